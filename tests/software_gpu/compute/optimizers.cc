// Optimizers, sums of squares, and random numbers.
#include <algorithm>
#include <array>
#include <random>
#include <unordered_map>

#include "compute.h"

namespace {

float clipped(float value, float most) { return most >= 0 ? std::max(-most, std::min(most, value)) : value; }

// An element of an array that a kernel reads, and writes with its request.
struct Cell {
  Array array;
  ll i;
  int request;
  operator double() const { return array[i]; }
  void operator=(double value) const { array.assign(i, request, value); }
};
template <size_t... I> std::array<Cell, sizeof...(I)> cells(const Launch& l, ll i, std::index_sequence<I...>) {
  return {Cell{l.array(I + 1), i, I ? 1 : l.value<int>(l.types.size() - 1)}...};
}
// An optimizer of one weight: the count of elements, the output and other arrays, scalars, the request of the output.
struct One {
  const Launch& launch;
  ll i;
  float operator()(size_t argument) const { return launch.value<float>(argument); }
  template <size_t count> std::array<Cell, count> arrays() const {
    return cells(launch, i, std::make_index_sequence<count>());
  }
};
template <void update(One)> void each(const Launch& l) {
  for (ll i = 0; i < l.integer(0); i++) update({l, i});
}

void sgd(One s) {  // (n, out, weight, gradient, clip, lr, wd, rescale, request)
  auto [out, w, g] = s.arrays<3>();
  out = (1 - s(5) * s(6)) * w - s(5) * clipped(s(7) * g, s(4));
}
void mp_sgd(One s) {  // (n, out, weight, gradient, master, clip, lr, wd, rescale, request)
  auto [out, half, g, w] = s.arrays<4>();
  w = (1 - s(6) * s(7)) * w - s(6) * clipped(s(8) * g, s(5));
  out = double(w);
}
void nag(One s) {  // (n, out, momentum, weight, gradient, clip, momentum, lr, wd, rescale, request)
  auto [out, m, w, g] = s.arrays<4>();
  const float step = s(7) * (clipped(s(9) * g, s(5)) + s(8) * w), before = s(6) * m;
  out = w - before + (s(6) + 1) * (before - step);
  m = before - step;
}
// (n, out, momentum, weight, gradient, master, clip, momentum, lr, wd, rescale, request)
void mp_nag(One s) {
  auto [out, m, half, g, w] = s.arrays<5>();
  const float gradient = clipped(s(10) * g, s(6)), before = s(7) * m;
  w = w - before + (s(7) + 1) * (before - s(8) * (gradient + s(9) * w));
  m = before - s(8) * (gradient + s(9) * w);  // MXNet decays the new weight here
  out = double(w);
}
// (n, out, mean, variance, weight, gradient, clip, rescale, beta1, beta2, lr, wd, epsilon, request)
void adam(One s) {
  auto [out, mean, var, w, g] = s.arrays<5>();
  const float gradient = clipped(g * s(7) + w * s(11), s(6));
  mean = s(8) * mean + (1 - s(8)) * gradient;
  var = s(9) * var + (1 - s(9)) * gradient * gradient;
  out = w - s(10) * mean / (std::sqrt(double(var)) + s(12));
}
// (n, out, state, weight, gradient, clip, rescale, gamma1, lr, wd, clip of weights, epsilon, request)
void rmsprop(One s) {
  auto [out, n, w, g] = s.arrays<4>();
  const double gradient = clipped(s(6) * g + s(9) * w, s(5));
  n = (1 - s(7)) * gradient * gradient + s(7) * n;
  out = clipped(w - s(8) * gradient / std::sqrt(n + s(11)), s(10));
}
// (n, out, n, g, delta, weight, gradient, clip, rescale, gamma1, gamma2, lr, wd, clip of weights, epsilon, request)
void centered_rmsprop(One s) {
  auto [out, n, mean, delta, w, g] = s.arrays<6>();
  const double gradient = clipped(s(8) * g + s(12) * w, s(7));
  n = (1 - s(9)) * gradient * gradient + s(9) * n;
  mean = (1 - s(9)) * gradient + s(9) * mean;
  delta = s(10) * delta - s(11) * gradient / std::sqrt(n - mean * mean + s(14));
  out = clipped(w + delta, s(13));
}
// (n, out, momentum, weight, gradient, clip, momentum, lr, wd, rescale, wd_lh, request)
void signum(One s) {
  auto [out, m, w, g] = s.arrays<4>();
  m = s(6) * m - (1 - s(6)) * s(8) * w - (1 - s(6)) * clipped(s(9) * g, s(5));
  out = (1 - s(7) * s(10)) * w + s(7) * ((m > 0) - (m < 0));
}
// ---- optimizers of many weights, whose addresses the kernel receives in a struct

struct Lists { int count; size_t largest; };

// A launch for many weights: its lists, and whether it has float32 masters of them.
template <class P> struct Many {
  const P& lists;
  const Type type;
  const bool masters;
  Many(const Launch& l, size_t at, const Name& masters)
      : lists(l.value<P>(at)), type(type_of(l.types.at(at).args.at(0))), masters(masters.id == "true") {}

  // new_weight(list, element, weight, gradient) for each element of each list
  template <class F> void each(int request, F new_weight) const {
    for (ll k = 0; k < (ll)lists.count; k++) {
      const Array weight{type, lists.weights[k]}, gradient{type, lists.gradients[k]}, out{type, lists.out[k]};
      for (ll i = 0; i < (ll)lists.sizes[k]; i++) {
        const float w = new_weight(k, i, masters ? lists.masters[k][i] : (float)weight[i], (float)gradient[i]);
        if (masters) lists.masters[k][i] = w;
        out.assign(i, request, w);
      }
    }
  }
};

struct ManySGD : Lists {
  size_t sizes[60];
  void *weights[60], *gradients[60];
  float *momenta[60], *masters[60];
  void* out[60];
  float lrs[60], wds[60], clip, rescale, momentum;
};
void many_sgd(const Launch& l) {  // <MPDType, momentum, masters>
  const auto& of = l.kernel.args.at(0).args;
  const bool has_momentum = of.at(1).id == "true";
  const Many<ManySGD> many(l, 1, of.at(2));
  const ManySGD& p = many.lists;
  many.each(l.value<int>(2), [&](ll k, ll i, float w, float gradient) {
    const float m = p.momentum * (has_momentum ? p.momenta[k][i] : 0) - p.lrs[k] * p.wds[k] * w -
                    p.lrs[k] * clipped(p.rescale * gradient, p.clip);
    if (has_momentum) p.momenta[k][i] = m;
    return w + m;
  });
}

struct ManyAdam : Lists {
  size_t sizes[50];
  void *weights[50], *gradients[50];
  float *means[50], *variances[50], *masters[50];
  void* out[50];
  float clip, beta1, beta2, etas[50], lrs[50], wds[50], epsilon;
};
void many_adamw(const Launch& l) {  // <MPDType, masters>(n, lists, request, rescale)
  const Many<ManyAdam> many(l, 1, l.kernel.args.at(0).args.at(1));
  const ManyAdam& p = many.lists;
  many.each(l.value<int>(2), [&](ll k, ll i, float w, float gradient) {
    const float g = clipped(l.value<float>(3) * gradient, p.clip);
    float &mean = p.means[k][i], &var = p.variances[k][i];
    mean = p.beta1 * (mean - g) + g;
    var = p.beta2 * (var - g * g) + g * g;
    return w - p.etas[k] * (p.lrs[k] * mean / (std::sqrt(var) + p.epsilon) + p.wds[k] * w);
  });
}

struct ManyLamb {
  size_t count, largest, total, sizes[45], places[45];
  void *weights[45], *gradients[45];
  float *means[45], *variances[45], *masters[45];
  void* out[45];
  int steps[45];
  float lrs[45], wds[45];
};
// <masters, ...>(lists, beta1, beta2, 1 - beta1, 1 - beta2, epsilon, clip, correct, rescale, updates, ...)
void lamb_step1(const Launch& l) {
  const Many<ManyLamb> many(l, 0, l.kernel.args.at(0));
  const ManyLamb& p = many.lists;
  const Array updates = l.array(9);
  const auto s = [&](size_t i) { return l.value<float>(i); };
  many.each(0, [&](ll k, ll i, float w, float gradient) {
    const float first = l.value<bool>(7) ? 1 - std::pow(s(1), (float)p.steps[k]) : 1;
    const float second = l.value<bool>(7) ? 1 - std::pow(s(2), (float)p.steps[k]) : 1;
    const float g = clipped(gradient * s(8), s(6));
    float &mean = p.means[k][i], &var = p.variances[k][i];
    mean = s(1) * mean + s(3) * g;
    var = s(2) * var + s(4) * g * g;
    updates.set(p.places[k] + i, mean / first / (std::sqrt(var / second) + s(5)) + p.wds[k] * w);
    return w;
  });
}
// (lists, squares of weights, of updates, updates, lower, upper, ..., ..., request)
void lamb_step2(const Launch& l) {
  const Many<ManyLamb> many(l, 0, l.kernel.args.at(0));
  const ManyLamb& p = many.lists;
  const Array squares = l.array(1), of_updates = l.array(2), updates = l.array(3);
  const float lower = l.value<float>(4), upper = l.value<float>(5);
  many.each(l.value<int>(8), [&](ll k, ll i, float w, float) {
    float norm = std::sqrt((float)squares[k]);
    const float other = std::sqrt((float)of_updates[k]);
    if (lower >= 0) norm = std::max(norm, lower);
    if (upper >= 0) norm = std::min(norm, upper);
    const float lr = norm == 0 || other == 0 ? p.lrs[k] : p.lrs[k] * norm / other;
    return w - lr * (float)updates[p.places[k] + i];
  });
}

// ---- sums of squares of many arrays, a chunk for each block

struct Squares {
  void* addresses[110];
  int sizes[110];
  unsigned char array_of_block[320];
  int chunk_of_block[320];
  int chunks;  // chunks of the longest array
};
void squares(const Launch& l) {  // (length of a chunk, lists, partial sums, number of the first array)
  const auto& p = l.value<Squares>(1);
  const Type type = type_of(l.types.at(1).args.at(0));
  const ll length = l.integer(0);
  for (unsigned block = 0; block < l.grid[0]; block++) {
    const int array = p.array_of_block[block], chunk = p.chunk_of_block[block];
    const Array x{type, p.addresses[array]};
    float total = 0;
    for (ll i = chunk * length; i < std::min((ll)p.sizes[array], (chunk + 1) * length); i++)
      total += (float)x[i] * (float)x[i];
    l.array(2).set((l.integer(3) + array) * p.chunks + chunk, total);
  }
}
void squares_of_arrays(const Launch& l) {  // (lists, partial sums, results)
  const auto& p = l.value<Squares>(0);
  for (unsigned array = 0; array < l.grid[0]; array++) {
    float total = 0;
    for (int chunk = 0; chunk < p.chunks; chunk++) total += l.array(1)[array * p.chunks + chunk];
    l.array(2).set(array, total);
  }
}

// ---- random numbers: another generator than a GPU's, by the address of its states

std::mt19937& generator(const void* states) {
  static auto& all = *new std::unordered_map<const void*, std::mt19937>();
  std::lock_guard<std::mutex> lock(g_mutex);
  return all[states];
}
void seed(const Launch& l) { generator(l.value<void*>(0)).seed(l.value<unsigned>(2)); }

double normal(std::mt19937& random, double mean, double deviation) {
  return std::normal_distribution<float>()(random) * deviation + mean;
}
double uniform(std::mt19937& random, double low, double high) {
  return low + (high - low) * std::uniform_real_distribution<float>()(random);
}
// (n, generator, n, step, parameters, samples, first, second, out)
template <double draw(std::mt19937&, double, double)> void sample(const Launch& l) {
  auto& random = generator(l.value<void*>(1));
  const ll parameters = l.integer(4), samples = l.integer(5), each = 1 + (samples - 1) / parameters;
  for (ll i = 0; i < samples; i++) l.array(8).set(i, draw(random, l.array(6)[i / each], l.array(7)[i / each]));
}

const Family g_updates(generic_kernels(), {
    {"SGDKernel", each<sgd>}, {"MP_SGDKernel", each<mp_sgd>}, {"NAGMomKernel", each<nag>},
    {"MP_NAGMomKernel", each<mp_nag>}, {"AdamUpdateKernel", each<adam>}, {"SignumKernel", each<signum>},
    {"RMSPropAlexUpdateKernel", each<centered_rmsprop>}, {"RMSPropUpdateKernel", each<rmsprop>},
    {"MultiSGDKernel", many_sgd}, {"MultiMPAdamWKernel", many_adamw}, {"SampleNormalKernel", sample<normal>},
    {"SampleUniformKernel", sample<uniform>}});
const Family g_squares(kernels(), {
    {"MultiSumSqKernel", squares}, {"GlobalReductionKernel", squares_of_arrays}, {"KernelStep1", lamb_step1},
    {"KernelStep2", lamb_step2}, {"rand_generator_seed_kernel", seed}});

}  // namespace

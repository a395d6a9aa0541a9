// Optimizers, sums of squares, and random numbers.
#include <algorithm>
#include <random>
#include <unordered_map>

#include "compute.h"

namespace {

float clipped(float value, float most) { return most >= 0 ? std::max(-most, std::min(most, value)) : value; }

// An optimizer of one weight: scalars from `first` on, the request last.
struct One {
  const Launch& launch;
  ll n = launch.integer(0);
  int request = launch.value<int>(launch.types.size() - 1);
  float operator()(size_t i) const { return launch.value<float>(i); }
};

void sgd(const Launch& l) {  // (n, out, weight, gradient, clip, lr, wd, rescale, request)
  const One s{l};
  const Array out = l.array(1), w = l.array(2), g = l.array(3);
  for (ll i = 0; i < s.n; i++) out.assign(i, s.request, (1 - s(5) * s(6)) * w[i] - s(5) * clipped(s(7) * g[i], s(4)));
}
void mp_sgd(const Launch& l) {  // (n, out, weight, gradient, master, clip, lr, wd, rescale, request)
  const One s{l};
  const Array out = l.array(1), g = l.array(3), w = l.array(4);
  for (ll i = 0; i < s.n; i++) {
    w.set(i, (1 - s(6) * s(7)) * w[i] - s(6) * clipped(s(8) * g[i], s(5)));
    out.assign(i, s.request, w[i]);
  }
}
void nag(const Launch& l) {  // (n, out, momentum, weight, gradient, clip, momentum, lr, wd, rescale, request)
  const One s{l};
  const Array out = l.array(1), m = l.array(2), w = l.array(3), g = l.array(4);
  for (ll i = 0; i < s.n; i++) {
    const float step = s(7) * (clipped(s(9) * g[i], s(5)) + s(8) * w[i]), before = s(6) * m[i];
    out.assign(i, s.request, w[i] - before + (s(6) + 1) * (before - step));
    m.set(i, before - step);
  }
}
void mp_nag(const Launch& l) {  // (n, out, momentum, weight, gradient, master, clip, momentum, lr, wd, rescale, request)
  const One s{l};
  const Array out = l.array(1), m = l.array(2), g = l.array(4), w = l.array(5);
  for (ll i = 0; i < s.n; i++) {
    const float gradient = clipped(s(10) * g[i], s(6)), before = s(7) * m[i];
    w.set(i, w[i] - before + (s(7) + 1) * (before - s(8) * (gradient + s(9) * w[i])));
    m.set(i, before - s(8) * (gradient + s(9) * w[i]));  // MXNet decays the new weight here
    out.assign(i, s.request, w[i]);
  }
}
// (n, out, mean, variance, weight, gradient, clip, rescale, beta1, beta2, lr, wd, epsilon, request)
void adam(const Launch& l) {
  const One s{l};
  const Array out = l.array(1), mean = l.array(2), var = l.array(3), w = l.array(4), g = l.array(5);
  for (ll i = 0; i < s.n; i++) {
    const float gradient = clipped(g[i] * s(7) + w[i] * s(11), s(6));
    mean.set(i, s(8) * mean[i] + (1 - s(8)) * gradient);
    var.set(i, s(9) * var[i] + (1 - s(9)) * gradient * gradient);
    out.assign(i, s.request, w[i] - s(10) * mean[i] / (std::sqrt(var[i]) + s(12)));
  }
}
// (n, out, weight, gradient, d, v, z, lr, beta1, beta2, epsilon, t, wd, rescale, clip, request)
void ftml(const Launch& l) {
  const One s{l};
  const Array out = l.array(1), w = l.array(2), g = l.array(3), d = l.array(4), v = l.array(5), z = l.array(6);
  for (ll i = 0; i < s.n; i++) {
    const double gradient = clipped(s(13) * g[i] + s(12) * w[i], s(14));
    v.set(i, s(9) * v[i] + (1 - s(9)) * gradient * gradient);
    const double now = (1 - std::pow(s(8), s(11))) / s(7) * (std::sqrt(v[i] / (1 - std::pow(s(9), s(11)))) + s(10));
    z.set(i, s(8) * z[i] + (1 - s(8)) * gradient - (now - s(8) * d[i]) * w[i]);
    d.set(i, now);
    out.assign(i, s.request, -z[i] / now);
  }
}
// (n, out, n, z, weight, gradient, clip, rescale, beta, lamda1, lr, wd, request)
void ftrl(const Launch& l) {
  const One s{l};
  const Array out = l.array(1), n = l.array(2), z = l.array(3), w = l.array(4), g = l.array(5);
  for (ll i = 0; i < s.n; i++) {
    const double gradient = clipped(g[i] * s(7), s(6)), square = gradient * gradient;
    z.set(i, z[i] + gradient - (std::sqrt(n[i] + square) - std::sqrt(n[i])) * w[i] / s(10));
    n.set(i, n[i] + square);
    const double sign = z[i] > 0 ? 1 : z[i] < 0 ? -1 : 0;
    out.assign(i, s.request, std::fabs(z[i]) > s(9)
                                 ? (sign * s(9) - z[i]) / ((s(8) + std::sqrt(n[i])) / s(10) + s(11)) : 0);
  }
}
// (n, out, state, weight, gradient, clip, rescale, gamma1, lr, wd, clip of weights, epsilon, request)
void rmsprop(const Launch& l) {
  const One s{l};
  const Array out = l.array(1), n = l.array(2), w = l.array(3), g = l.array(4);
  for (ll i = 0; i < s.n; i++) {
    const double gradient = clipped(s(6) * g[i] + s(9) * w[i], s(5));
    n.set(i, (1 - s(7)) * gradient * gradient + s(7) * n[i]);
    out.assign(i, s.request, clipped(w[i] - s(8) * gradient / std::sqrt(n[i] + s(11)), s(10)));
  }
}
// (n, out, n, g, delta, weight, gradient, clip, rescale, gamma1, gamma2, lr, wd, clip of weights, epsilon, request)
void centered_rmsprop(const Launch& l) {
  const One s{l};
  const Array out = l.array(1), n = l.array(2), mean = l.array(3), delta = l.array(4), w = l.array(5), g = l.array(6);
  for (ll i = 0; i < s.n; i++) {
    const double gradient = clipped(s(8) * g[i] + s(12) * w[i], s(7));
    n.set(i, (1 - s(9)) * gradient * gradient + s(9) * n[i]);
    mean.set(i, (1 - s(9)) * gradient + s(9) * mean[i]);
    delta.set(i, s(10) * delta[i] - s(11) * gradient / std::sqrt(n[i] - mean[i] * mean[i] + s(14)));
    out.assign(i, s.request, clipped(w[i] + delta[i], s(13)));
  }
}
// (n, out, momentum, weight, gradient, clip, momentum, lr, wd, rescale, wd_lh, request)
void signum(const Launch& l) {
  const One s{l};
  const Array out = l.array(1), m = l.array(2), w = l.array(3), g = l.array(4);
  for (ll i = 0; i < s.n; i++) {
    m.set(i, s(6) * m[i] - (1 - s(6)) * s(8) * w[i] - (1 - s(6)) * clipped(s(9) * g[i], s(5)));
    out.assign(i, s.request, (1 - s(7) * s(10)) * w[i] + s(7) * ((m[i] > 0) - (m[i] < 0)));
  }
}
void multi_lars(const Launch& l) {  // (n, out, lrs, squares of weights, of gradients, wds, eta, eps, rescale, request)
  const One s{l};
  const Array out = l.array(1), lr = l.array(2), w = l.array(3), g = l.array(4), wd = l.array(5);
  for (ll i = 0; i < s.n; i++) {
    const double norm = std::sqrt(w[i]);
    out.assign(i, s.request, norm > 0 && g[i] > 0
        ? lr[i] * s(6) * norm / (std::sqrt(g[i]) * s(8) + wd[i] * norm + s(7)) : lr[i]);
  }
}

// ---- optimizers of many weights, whose addresses the kernel receives in a struct

struct Lists { int count; size_t largest; };

struct ManySGD : Lists {
  size_t sizes[60];
  void *weights[60], *gradients[60];
  float *momenta[60], *masters[60];
  void* out[60];
  float lrs[60], wds[60], clip, rescale, momentum;
};
struct PreloadedSGD : Lists {
  size_t sizes[60];
  void *weights[60], *gradients[60];
  float *momenta[60], *masters[60];
  void* out[60];
  float *lrs, *wds, clip, rescale, momentum;
};
template <class P> void many_sgd(const Launch& l) {  // <MPDType, momentum, masters>
  const auto& p = l.value<P>(1);
  const Type type = type_of(l.types.at(1).args.at(0));
  const bool momentum = l.kernel.args.at(0).args.at(1).id == "true", masters = l.kernel.args.at(0).args.at(2).id == "true";
  for (int k = 0; k < p.count; k++) {
    const Array weight{type, p.weights[k]}, gradient{type, p.gradients[k]}, out{type, p.out[k]};
    for (ll i = 0; i < (ll)p.sizes[k]; i++) {
      const float w = masters ? p.masters[k][i] : (float)weight[i];
      const float m = p.momentum * (momentum ? p.momenta[k][i] : 0) - p.lrs[k] * p.wds[k] * w -
                      p.lrs[k] * clipped(p.rescale * gradient[i], p.clip);
      if (momentum) p.momenta[k][i] = m;
      if (masters) p.masters[k][i] = w + m;
      out.assign(i, l.value<int>(2), w + m);
    }
  }
}

struct ManyAdam : Lists {
  size_t sizes[50];
  void *weights[50], *gradients[50];
  float *means[50], *variances[50], *masters[50];
  void* out[50];
  float clip, beta1, beta2, etas[50], lrs[50], wds[50], epsilon;
};
void many_adamw(const Launch& l) {  // <MPDType, masters>(n, lists, request, rescale)
  const auto& p = l.value<ManyAdam>(1);
  const Type type = type_of(l.types.at(1).args.at(0));
  const bool masters = l.kernel.args.at(0).args.at(1).id == "true";
  for (int k = 0; k < p.count; k++) {
    const Array weight{type, p.weights[k]}, gradient{type, p.gradients[k]}, out{type, p.out[k]};
    for (ll i = 0; i < (ll)p.sizes[k]; i++) {
      float w = masters ? p.masters[k][i] : (float)weight[i];
      const float g = clipped(l.value<float>(3) * (float)gradient[i], p.clip);
      const float mean = p.beta1 * (p.means[k][i] - g) + g, var = p.beta2 * (p.variances[k][i] - g * g) + g * g;
      p.means[k][i] = mean;
      p.variances[k][i] = var;
      w -= p.etas[k] * (p.lrs[k] * mean / (std::sqrt(var) + p.epsilon) + p.wds[k] * w);
      if (masters) p.masters[k][i] = w;
      out.assign(i, l.value<int>(2), w);
    }
  }
}

struct ManyLamb {
  size_t count, largest, total, sizes[45], places[45];
  void *weights[45], *gradients[45];
  float *means[45], *variances[45], *masters[45];
  void* out[45];
  int steps[45];
  float lrs[45], wds[45];
};
// <masters, ...>(lists, beta1, beta2, 1 - beta1, 1 - beta2, epsilon, clip, correct, rescale, temporary, ...)
void lamb_step1(const Launch& l) {
  const auto& p = l.value<ManyLamb>(0);
  const Type type = type_of(l.types.at(0).args.at(0));
  const bool masters = l.kernel.args.at(0).id == "true", correct = l.value<bool>(7);
  const auto s = [&](size_t i) { return l.value<float>(i); };
  for (size_t k = 0; k < p.count; k++) {
    const Array weight{type, p.weights[k]}, gradient{type, p.gradients[k]}, to = l.array(9);
    const float first = correct ? 1 - std::pow(s(1), (float)p.steps[k]) : 1;
    const float second = correct ? 1 - std::pow(s(2), (float)p.steps[k]) : 1;
    for (ll i = 0; i < (ll)p.sizes[k]; i++) {
      const float w = masters ? p.masters[k][i] : (float)weight[i];
      const float g = clipped((float)gradient[i] * s(8), s(6));
      float &mean = p.means[k][i], &var = p.variances[k][i];
      mean = s(1) * mean + s(3) * g;
      var = s(2) * var + s(4) * g * g;
      to.set(p.places[k] + i, mean / first / (std::sqrt(var / second) + s(5)) + p.wds[k] * w);
    }
  }
}
// (lists, squares of weights, of updates, updates, lower, upper, ..., ..., request)
void lamb_step2(const Launch& l) {
  const auto& p = l.value<ManyLamb>(0);
  const Type type = type_of(l.types.at(0).args.at(0));
  const bool masters = l.kernel.args.at(0).id == "true";
  const float lower = l.value<float>(4), upper = l.value<float>(5);
  for (size_t k = 0; k < p.count; k++) {
    const Array weight{type, p.weights[k]}, out{type, p.out[k]}, update = l.array(3);
    float norm = std::sqrt((float)l.array(1)[k]);
    const float other = std::sqrt((float)l.array(2)[k]);
    if (lower >= 0) norm = std::max(norm, lower);
    if (upper >= 0) norm = std::min(norm, upper);
    const float lr = norm == 0 || other == 0 ? p.lrs[k] : p.lrs[k] * norm / other;
    for (ll i = 0; i < (ll)p.sizes[k]; i++) {
      const float w = (masters ? p.masters[k][i] : (float)weight[i]) - lr * (float)update[p.places[k] + i];
      if (masters) p.masters[k][i] = w;
      out.assign(i, l.value<int>(8), w);
    }
  }
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

// (n, generator, n, step, parameters, samples, first, second, out)
template <class F> void sample(const Launch& l, F draw) {
  auto& random = generator(l.value<void*>(1));
  const ll parameters = l.integer(4), samples = l.integer(5), each = 1 + (samples - 1) / parameters;
  const Array first = l.array(6), second = l.array(7), out = l.array(8);
  for (ll i = 0; i < samples; i++) out.set(i, draw(random, first[i / each], second[i / each]));
}
void normal(const Launch& l) {
  sample(l, [](std::mt19937& g, double mean, double deviation) {
    return std::normal_distribution<float>()(g) * deviation + mean;
  });
}
void uniform(const Launch& l) {
  sample(l, [](std::mt19937& g, double low, double high) {
    return low + (high - low) * std::uniform_real_distribution<float>()(g);
  });
}

const Family g_updates(generic_kernels(), {
    {"SGDKernel", sgd}, {"MP_SGDKernel", mp_sgd}, {"NAGMomKernel", nag}, {"MP_NAGMomKernel", mp_nag},
    {"AdamUpdateKernel", adam}, {"FTMLKernel", ftml}, {"RMSPropAlexUpdateKernel", centered_rmsprop},
    {"FtrlUpdateKernel", ftrl}, {"RMSPropUpdateKernel", rmsprop}, {"SignumKernel", signum},
    {"MultiLARSKernel", multi_lars}, {"MultiSGDKernel", many_sgd<ManySGD>},
    {"PreloadedMultiSGDKernel", many_sgd<PreloadedSGD>}, {"MultiMPAdamWKernel", many_adamw},
    {"SampleNormalKernel", normal}, {"SampleUniformKernel", uniform}});
const Family g_squares(kernels(), {
    {"MultiSumSqKernel", squares}, {"GlobalReductionKernel", squares_of_arrays}, {"KernelStep1", lamb_step1},
    {"KernelStep2", lamb_step2}, {"rand_generator_seed_kernel", seed}});

}  // namespace

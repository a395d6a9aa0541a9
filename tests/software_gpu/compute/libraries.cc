// cuBLAS and cuDNN: products, convolutions, batch norms, activations, poolings, softmax, dropout.
#include "libraries.h"

#include <algorithm>
#include <random>

Type of_cuda(int type) {
  static const Type all[] = {Type::kFloat, Type::kDouble, Type::kHalf, Type::kInt8};
  if (type < 0 || type > 3) unknown("type " + std::to_string(type));
  return all[type];
}

double scalar(V pointer, D tensor) { return tensor->type == 1 ? *(const double*)pointer : *(const float*)pointer; }

// ---- products

void multiply(int m, int n, int k, const Factor& a, const Factor& b, const Factor& c, double alpha, double beta,
              Sums sums, int batch) {
  std::vector<float> left((size_t)m * k), right((size_t)k * n), made((size_t)m * n);
  for (ll one = 0; one < batch; one++) {
    const auto at = [&](const Factor& x) { return Array{x.type, (char*)x.data + one * x.stride * width(x.type)}; };
    const Array x = at(a), y = at(b), z = at(c);
    for (ll i = 0; i < m; i++)
      for (ll l = 0; l < k; l++) left[i * k + l] = x[a.transposed ? l + i * a.ld : i + l * a.ld];
    for (ll l = 0; l < k; l++)
      for (ll j = 0; j < n; j++) right[l * n + j] = y[b.transposed ? j + l * b.ld : l + j * b.ld];
    product(m, n, k, left.data(), right.data(), made.data(), sums);
    for (ll i = 0; i < m; i++)
      for (ll j = 0; j < n; j++) {
        const ll to = i + j * c.ld;
        z.set(to, alpha * made[i * n + j] + (beta ? beta * z[to] : 0));
      }
  }
}

namespace {

// ---- tensors: dense copies in float32, and back

ll count(const std::vector<int>& dims) {
  ll n = 1;
  for (int d : dims) n *= d;
  return n;
}

// f(position in memory, position in a dense array) for each element
template <class F> void each(D d, F f) {
  std::vector<int> strides = d->strides;
  if (d->format == 1 && d->dims.size() == 4) {  // channels-last, also for filters
    const auto& n = d->dims;
    strides = {n[1] * n[2] * n[3], 1, n[3] * n[1], n[1]};
  }
  std::vector<int> at(d->dims.size());
  const ll n = count(d->dims);
  for (ll i = 0; i < n; i++) {
    ll place = 0;
    for (size_t k = 0; k < at.size(); k++) place += (ll)at[k] * strides[k];
    f(place, i);
    for (int k = (int)at.size() - 1; k >= 0 && ++at[k] == d->dims[k]; k--) at[k] = 0;
  }
}

std::vector<float> read(D d, V data) {
  const Array from{of_cuda(d->type), (void*)data};
  std::vector<float> made(count(d->dims));
  each(d, [&](ll place, ll i) { made[i] = from[place]; });
  return made;
}
template <class F> void write(V alpha, V beta, D d, V data, F value) {
  const Array to{of_cuda(d->type), (void*)data};
  const double a = scalar(alpha, d), b = scalar(beta, d);
  each(d, [&](ll place, ll i) { to.set(place, a * value(i) + (b ? b * to[place] : 0)); });
}

// ---- convolutions, by im2col for each image and group

struct Convolution {
  D xd, wd, conv, yd;
  Sums sums = conv->compute == 2 ? Sums::kHalf : Sums::kFloat;
  size_t axes = conv->pad.size();
  ll batch = xd->dims[0], groups = conv->groups, in = xd->dims[1] / groups, out = yd->dims[1] / groups;
  ll window = 1, places = 1, pixels = 1;  // of a filter, of the output, of the input
  Convolution(D x, D w, D c, D y) : xd(x), wd(w), conv(c), yd(y) {
    for (size_t k = 0; k < axes; k++) {
      window *= wd->dims[k + 2];
      places *= yd->dims[k + 2];
      pixels *= xd->dims[k + 2];
    }
  }
  // f(row of the matrix, position, pixel) for each element inside the image
  template <class F> void windows(F f) const {
    for (ll tap = 0; tap < window; tap++)
      for (ll place = 0; place < places; place++) {
        ll t = tap, p = place, pixel = 0, step = 1;
        bool inside = true;
        for (int k = (int)axes - 1; k >= 0; k--) {
          const int kernel = wd->dims[k + 2], size = xd->dims[k + 2];
          const ll at = p % yd->dims[k + 2] * conv->stride[k] - conv->pad[k] +
                        (conv->mode ? t % kernel : kernel - 1 - t % kernel) * conv->dilate[k];
          inside &= at >= 0 && at < size;
          pixel += at * step;
          step *= size;
          t /= kernel;
          p /= yd->dims[k + 2];
        }
        if (inside)
          for (ll c = 0; c < in; c++) f(c * window + tap, place, c * pixels + pixel);
      }
  }
  void fill(const float* image, float* matrix) const {
    std::fill(matrix, matrix + in * window * places, 0.0f);
    windows([&](ll row, ll place, ll pixel) { matrix[row * places + place] = image[pixel]; });
  }
};

}  // namespace

void convolution_forward(V alpha, D xd, V x, D wd, V w, D conv, V beta, D yd, V y) {
  const Convolution c(xd, wd, conv, yd);
  const auto data = read(xd, x), weight = read(wd, w);
  std::vector<float> made(count(yd->dims)), matrix(c.in * c.window * c.places);
  for (ll image = 0; image < c.batch * c.groups; image++) {
    c.fill(&data[image * c.in * c.pixels], matrix.data());
    product(c.out, c.places, c.in * c.window, &weight[image % c.groups * c.out * c.in * c.window], matrix.data(),
            &made[image * c.out * c.places], c.sums);
  }
  write(alpha, beta, yd, y, [&](ll i) { return made[i]; });
}

void convolution_data(V alpha, D wd, V w, D yd, V dy, D conv, V beta, D xd, V dx) {
  const Convolution c(xd, wd, conv, yd);
  const auto gradient = read(yd, dy), weight = read(wd, w);
  std::vector<float> made(count(xd->dims)), matrix(c.in * c.window * c.places);
  for (ll image = 0; image < c.batch * c.groups; image++) {
    const auto turned = transposed(&weight[image % c.groups * c.out * c.in * c.window], c.out, c.in * c.window);
    product(c.in * c.window, c.places, c.out, turned.data(), &gradient[image * c.out * c.places], matrix.data(), c.sums);
    float* to = &made[image * c.in * c.pixels];
    c.windows([&](ll row, ll place, ll pixel) { to[pixel] += matrix[row * c.places + place]; });
  }
  write(alpha, beta, xd, dx, [&](ll i) { return made[i]; });
}

void convolution_weight(V alpha, D xd, V x, D yd, V dy, D conv, V beta, D wd, V dw) {
  const Convolution c(xd, wd, conv, yd);
  const auto data = read(xd, x), gradient = read(yd, dy);
  std::vector<float> made(count(wd->dims)), matrix(c.in * c.window * c.places), part(c.out * c.in * c.window);
  for (ll image = 0; image < c.batch * c.groups; image++) {
    c.fill(&data[image * c.in * c.pixels], matrix.data());
    const auto turned = transposed(matrix.data(), c.in * c.window, c.places);
    product(c.out, c.in * c.window, c.places, &gradient[image * c.out * c.places], turned.data(), part.data(), c.sums);
    float* to = &made[image % c.groups * c.out * c.in * c.window];
    for (size_t i = 0; i < part.size(); i++) to[i] = c.sums == Sums::kHalf ? as_half(to[i] + part[i]) : to[i] + part[i];
  }
  write(alpha, beta, wd, dw, [&](ll i) { return made[i]; });
}

void bias_gradient(V alpha, D yd, V dy, V beta, D bd, V db) {
  const auto gradient = read(yd, dy);
  const ll channels = yd->dims[1], pixels = gradient.size() / yd->dims[0] / channels;
  std::vector<double> made(channels);
  for (size_t i = 0; i < gradient.size(); i++) made[i / pixels % channels] += gradient[i];
  write(alpha, beta, bd, db, [&](ll i) { return made[i]; });
}

void add_tensor(V alpha, D ad, V a, V beta, D cd, V c) {  // a's axes of length 1 are broadcast
  const auto added = read(ad, a);
  const auto& n = cd->dims;
  write(alpha, beta, cd, c, [&](ll i) {
    ll from = 0, step = 1;
    for (int k = (int)n.size() - 1; k >= 0; k--) {
      if (ad->dims[k] > 1) from += i % n[k] * step;
      step *= ad->dims[k];
      i /= n[k];
    }
    return added[from];
  });
}

// ---- batch norms

namespace {

// The number of parameters, the elements of each, and the parameter of an element.
struct Groups {
  ll parameters, pixels, each;
  bool spatial;
  Groups(const Norm& norm) : spatial(norm.mode) {
    const ll n = count(norm.xd->dims), batch = norm.xd->dims[0];
    parameters = spatial ? norm.xd->dims[1] : n / batch;
    pixels = n / batch / norm.xd->dims[1];
    each = n / parameters;
  }
  ll operator()(ll i) const { return spatial ? i / pixels % parameters : i % parameters; }
};
Array parameters(const Norm& norm, V data) { return {of_cuda(norm.pd->type), (void*)data}; }

struct Moments {  // moments of each group
  std::vector<double> mean, variance;
  Moments(const Groups& group, const std::vector<float>& data) : mean(group.parameters), variance(group.parameters) {
    for (size_t i = 0; i < data.size(); i++) mean[group(i)] += data[i] / (double)group.each;
    for (size_t i = 0; i < data.size(); i++) {
      const double d = data[i] - mean[group(i)];
      variance[group(i)] += d * d / group.each;
    }
  }
};

}  // namespace

void norm_training(const Norm& norm, V x, V y, V gamma, V bias, V running_mean, V running_var, V mean, V inverse) {
  const Groups group(norm);
  const auto data = read(norm.xd, x);
  const Moments moments(group, data);
  const auto &m = moments.mean, &v = moments.variance;
  std::vector<double> inv(group.parameters);
  for (ll k = 0; k < group.parameters; k++) {
    inv[k] = 1 / std::sqrt(v[k] + norm.epsilon);
    const auto update = [&](V running, double value) {
      if (!running) return;
      const Array to = parameters(norm, running);
      to.set(k, (norm.factor == 1 ? 0 : (1 - norm.factor) * to[k]) + norm.factor * value);
    };
    update(running_mean, m[k]);
    update(running_var, group.each > 1 ? v[k] * group.each / (group.each - 1) : v[k]);
    if (mean) parameters(norm, mean).set(k, m[k]);
    if (inverse) parameters(norm, inverse).set(k, inv[k]);
  }
  const Array g = parameters(norm, gamma), b = parameters(norm, bias);
  const auto added = norm.z ? read(norm.xd, norm.z) : std::vector<float>();
  write(norm.alpha, norm.beta, norm.xd, y, [&](ll i) {
    const ll k = group(i);
    const double sum = g[k] * (data[i] - m[k]) * inv[k] + b[k] + (norm.z ? added[i] : 0);
    return norm.relu && sum < 0 ? 0 : sum;
  });
}

void norm_inference(const Norm& norm, V x, V y, V gamma, V bias, V mean, V variance) {
  const Groups group(norm);
  const auto data = read(norm.xd, x);
  const Array g = parameters(norm, gamma), b = parameters(norm, bias), m = parameters(norm, mean),
              v = parameters(norm, variance);
  write(norm.alpha, norm.beta, norm.xd, y, [&](ll i) {
    const ll k = group(i);
    return g[k] * (data[i] - m[k]) / std::sqrt(v[k] + norm.epsilon) + b[k];
  });
}

void norm_backward(const Norm& norm, V alpha_parameters, V beta_parameters, V x, V y, V dy, V dz, V dx, V gamma, V dgamma,
                   V dbias, V mean, V inverse) {
  const Groups group(norm);
  const auto data = read(norm.xd, x);
  auto gradient = read(norm.xd, dy);
  if (norm.relu) {
    const auto out = read(norm.xd, y);
    for (size_t i = 0; i < out.size(); i++)
      if (!(out[i] > 0)) gradient[i] = 0;
  }
  if (dz) write(norm.alpha, norm.beta, norm.xd, dz, [&](ll i) { return gradient[i]; });
  std::vector<double> m(group.parameters), inv(group.parameters), first(group.parameters), second(group.parameters);
  if (mean && inverse) {
    for (ll k = 0; k < group.parameters; k++) {
      m[k] = parameters(norm, mean)[k];
      inv[k] = parameters(norm, inverse)[k];
    }
  } else {
    const Moments moments(group, data);
    m = moments.mean;
    for (ll k = 0; k < group.parameters; k++) inv[k] = 1 / std::sqrt(moments.variance[k] + norm.epsilon);
  }
  for (size_t i = 0; i < data.size(); i++) {
    const ll k = group(i);
    first[k] += gradient[i];
    second[k] += gradient[i] * (data[i] - m[k]) * inv[k];
  }
  const Array g = parameters(norm, gamma);
  write(norm.alpha, norm.beta, norm.xd, dx, [&](ll i) {
    const ll k = group(i);
    return g[k] * inv[k] * (gradient[i] - first[k] / group.each - (data[i] - m[k]) * inv[k] * second[k] / group.each);
  });
  write(alpha_parameters, beta_parameters, norm.pd, dgamma, [&](ll k) { return second[k]; });
  write(alpha_parameters, beta_parameters, norm.pd, dbias, [&](ll k) { return first[k]; });
}

// ---- activations

void activation(D a, V alpha, D xd, V x, V beta, D yd, V y) {
  const auto data = read(xd, x);
  write(alpha, beta, yd, y, [&](ll i) -> double {
    const double v = data[i];
    switch (a->mode) {
      case 0: return 1 / (1 + std::exp(-v));
      case 1: return v > 0 || v != v ? v : 0;
      case 2: return std::tanh(v);
      default: unknown("activation " + std::to_string(a->mode));
    }
  });
}
void activation_backward(D a, V alpha, D yd, V y, V dy, V x, V beta, V dx) {
  const auto out = read(yd, y), gradient = read(yd, dy);
  write(alpha, beta, yd, dx, [&](ll i) -> double {
    const double v = out[i];
    switch (a->mode) {
      case 0: return gradient[i] * v * (1 - v);
      case 1: return v > 0 ? gradient[i] : v != v ? v : 0;
      case 2: return gradient[i] * (1 - v * v);
      default: unknown("activation " + std::to_string(a->mode));
    }
  });
}

// ---- poolings

namespace {

// f(output, inputs in its window) for each output; the count of an average, padding included or not
template <class F> void pools(D p, D xd, D yd, F f) {
  const size_t axes = p->window.size();
  std::vector<ll> window;
  const ll places = count(yd->dims);
  for (ll i = 0; i < places; i++) {
    std::vector<ll> begin(axes), end(axes);
    ll rest = i, all = 1;
    for (int k = (int)axes - 1; k >= 0; k--) {
      const ll start = rest % yd->dims[k + 2] * p->stride[k] - p->pad[k], size = xd->dims[k + 2];
      all *= std::min(start + p->window[k], size + p->pad[k]) - start;
      begin[k] = std::max(start, 0LL);
      end[k] = std::min(start + p->window[k], size);
      rest /= yd->dims[k + 2];
    }
    window.assign(1, rest);  // image and channel
    for (size_t k = 0; k < axes; k++) {
      std::vector<ll> next;
      for (ll base : window)
        for (ll at = begin[k]; at < end[k]; at++) next.push_back(base * xd->dims[k + 2] + at);
      window.swap(next);
    }
    f(i, window, p->mode == 1 ? all : (ll)window.size());
  }
}
bool is_maximum(D p) { return p->mode == 0 || p->mode == 3; }

}  // namespace

void pooling(D p, V alpha, D xd, V x, V beta, D yd, V y) {
  const auto data = read(xd, x);
  std::vector<double> made(count(yd->dims));
  pools(p, xd, yd, [&](ll i, const std::vector<ll>& window, ll n) {
    double value = is_maximum(p) ? -INFINITY : 0;
    for (ll at : window) value = !is_maximum(p) ? value + data[at] : data[at] > value || data[at] != data[at] ? data[at] : value;
    made[i] = is_maximum(p) ? value : value / n;
  });
  write(alpha, beta, yd, y, [&](ll i) { return made[i]; });
}
void pooling_backward(D p, V alpha, D yd, V y, V dy, D xd, V x, V beta, V dx) {
  const auto data = read(xd, x), out = read(yd, y), gradient = read(yd, dy);
  std::vector<double> made(data.size());
  pools(p, xd, yd, [&](ll i, const std::vector<ll>& window, ll n) {
    if (is_maximum(p)) {
      for (ll at : window)
        if (data[at] == out[i]) {  // the first maximum
          made[at] += gradient[i];
          break;
        }
    } else {
      for (ll at : window) made[at] += gradient[i] / n;
    }
  });
  write(alpha, beta, xd, dx, [&](ll i) { return made[i]; });
}

// ---- softmax, over channels (mode 1) or the whole image (mode 0)

namespace {

template <class F> void softmax_rows(int mode, D d, F f) {
  const ll batch = d->dims[0], n = count(d->dims) / batch, m = mode ? d->dims[1] : n, pixels = n / m;
  for (ll b = 0; b < batch; b++)
    for (ll p = 0; p < pixels; p++) f(b * n + p, m, pixels);
}

}  // namespace

void softmax(int algorithm, int mode, V alpha, D xd, V x, V beta, V y) {
  const auto data = read(xd, x);
  std::vector<double> made(data.size());
  softmax_rows(mode, xd, [&](ll first, ll m, ll step) {
    soft_max(m, algorithm == 2, [&](ll i) { return data[first + i * step]; },
             [&](ll i, double value) { made[first + i * step] = value; });
  });
  write(alpha, beta, xd, y, [&](ll i) { return made[i]; });
}
void softmax_backward(int algorithm, int mode, V alpha, D yd, V y, V dy, V beta, V dx) {
  const auto out = read(yd, y), gradient = read(yd, dy);
  std::vector<double> made(out.size());
  softmax_rows(mode, yd, [&](ll first, ll m, ll step) {
    soft_max_gradient(m, algorithm == 2, [&](ll i) { return out[first + i * step]; },
                      [&](ll i) { return gradient[first + i * step]; },
                      [&](ll i, double value) { made[first + i * step] = value; });
  });
  write(alpha, beta, yd, dx, [&](ll i) { return made[i]; });
}

// ---- dropout: the reserve space has a bit for each kept element

void dropout(D d, D xd, V x, V y, V reserve) {
  static auto& random = *new std::mt19937(number("RECORDING_GPU_SEED", 1));
  const Array from{of_cuda(xd->type), (void*)x}, to{of_cuda(xd->type), (void*)y};
  auto* bits = (unsigned char*)reserve;
  std::lock_guard<std::mutex> lock(g_mutex);
  each(xd, [&](ll place, ll i) {
    const bool stays = std::uniform_real_distribution<float>()(random) >= d->dropout;
    if (i % 8 == 0) bits[i / 8] = 0;
    bits[i / 8] |= stays << i % 8;
    to.set(place, stays ? from[place] / (1 - d->dropout) : 0);
  });
}
void dropout_backward(D d, D xd, V dy, V dx, V reserve) {
  const Array from{of_cuda(xd->type), (void*)dy}, to{of_cuda(xd->type), (void*)dx};
  const auto* bits = (const unsigned char*)reserve;
  each(xd, [&](ll place, ll i) { to.set(place, bits[i / 8] >> i % 8 & 1 ? from[place] / (1 - d->dropout) : 0); });
}

void add_up(const std::vector<const void*>& from, void* to, size_t count, Type type) {
  const Array out{type, to};
  for (size_t i = 0; i < count; i++) {
    double total = 0;
    for (const void* one : from) total = out.rounded(total + Array{type, (void*)one}[i]);
    out.set(i, total);
  }
}

// Convolutions and deconvolutions that emulate a GPU's Tensor Cores, forward and backward.
//
// Both relate a large array, (batch, channels, positions), to a small one with an element for each position of
// the window. A convolution reads the large array, and a deconvolution computes it. Each of the three products
// is a matrix product of gathered windows (im2col):
//   small = weight * windows of large         summed over channels of large, then the window
//   large = weight * windows of small         summed over channels of small, then the window
//   weight = small * windows of large         summed over batch, then places of small
// Positions are depth, height, width, in this order. Padding is a zero, which does not change a sum but counts
// as a product of an instruction.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "tensor_core/emulation.h"

namespace gluon_amp {
namespace {

constexpr int64_t kGathered = int64_t(1) << 22;  // 16-bit numbers at a time: 8 MB

using Three = std::vector<int64_t>;  // depth, height, width; leading ones if there are fewer

Three three(std::vector<int64_t> given, size_t dims, int64_t otherwise) {
  if (given.empty()) given.assign(dims, otherwise);
  if (given.size() != dims) throw dmlc::Error("accumulate=: a window needs a number for each axis");
  given.insert(given.begin(), 3 - dims, otherwise);
  return given;
}

int64_t product_of(const Three& x) { return x[0] * x[1] * x[2]; }

// An array (batch, channels, positions).
struct Images {
  int64_t batch, channels;
  Three places;

  explicit Images(const TBlob& of) : batch(of.shape_[0]), channels(of.shape_[1]) {
    for (int k = 2; k < of.ndim(); ++k) places.push_back(of.shape_[k]);
    places.insert(places.begin(), 3 - places.size(), 1);
  }
  int64_t plane() const { return product_of(places); }
};

struct Geometry {
  Images large, small;
  int64_t groups;
  Three window, stride, dilate, pad;

  Geometry(const NodeAttrs& attrs, const TBlob& l, const TBlob& s)
      : large(l), small(s), groups(static_cast<int64_t>(number(attrs, "num_group", 1))) {
    const size_t dims = l.ndim() - 2;
    window = three(numbers(attrs, "kernel"), dims, 1);
    stride = three(numbers(attrs, "stride"), dims, 1);
    dilate = three(numbers(attrs, "dilate"), dims, 1);
    pad = three(numbers(attrs, "pad"), dims, 0);
    const auto target = numbers(attrs, "target_shape");  // of a deconvolution: determines the pad
    if (std::any_of(target.begin(), target.end(), [](int64_t n) { return n != 0; }))
      for (size_t k = 3 - dims; k < 3; ++k)
        pad[k] = (stride[k] * (small.places[k] - 1) + (window[k] - 1) * dilate[k] + 1 -
                  target[k - (3 - dims)] + 1) / 2;
  }

  int64_t taps() const { return product_of(window); }
  int64_t large_channels() const { return large.channels / groups; }
  int64_t small_channels() const { return small.channels / groups; }
};

// For an axis: the index that each element of the window (`tap`) reads for each index of the result; -1 for
// padding. From the large array's indices to the small one's, or back.
std::vector<int64_t> looks(const Geometry& g, int axis, bool from_large) {
  const int64_t places = (from_large ? g.small : g.large).places[axis],
                seen = (from_large ? g.large : g.small).places[axis], step = g.stride[axis];
  std::vector<int64_t> made;
  for (int64_t tap = 0; tap < g.window[axis]; ++tap)
    for (int64_t place = 0; place < places; ++place) {
      int64_t at = from_large ? place * step - g.pad[axis] + tap * g.dilate[axis]
                              : place + g.pad[axis] - tap * g.dilate[axis];
      if (!from_large) at = at >= 0 && at % step == 0 ? at / step : -1;
      made.push_back(at >= 0 && at < seen ? at : -1);
    }
  return made;
}

// The windows of one of the arrays.
struct Windows {
  const Geometry& g;
  const Images &seen, &places;
  std::vector<int64_t> table[3];

  Windows(const Geometry& geometry, bool from_large)
      : g(geometry), seen(from_large ? g.large : g.small), places(from_large ? g.small : g.large) {
    for (int axis = 0; axis < 3; ++axis) table[axis] = looks(g, axis, from_large);
  }

  // Rows: channels from `channel` on, times the window's elements. Columns: `images` images from `image` on,
  // times positions.
  void gather(const Number16* from, int64_t channel, int64_t channels, int64_t image, int64_t images,
              Number16* to) const {
    const int64_t nd = places.places[0], nh = places.places[1], nw = places.places[2];
    const int64_t sh = seen.places[1], sw = seen.places[2], taps = g.taps();
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < channels * taps; ++row) {
      const int64_t tap = row % taps, tw = tap % g.window[2], th = tap / g.window[2] % g.window[1],
                    td = tap / g.window[2] / g.window[1];
      const int64_t *at_d = &table[0][td * nd], *at_h = &table[1][th * nh],
                    *at_w = &table[2][tw * nw];
      Number16* out = to + row * images * nd * nh * nw;
      for (int64_t i = 0; i < images; ++i) {
        const Number16* plane =
            from + ((image + i) * seen.channels + channel + row / taps) * seen.plane();
        for (int64_t d = 0; d < nd; ++d)
          for (int64_t h = 0; h < nh; ++h, out += nw) {
            if (at_d[d] < 0 || at_h[h] < 0) {
              std::memset(out, 0, nw * sizeof(Number16));
              continue;
            }
            const Number16* line = plane + (at_d[d] * sh + at_h[h]) * sw;
            for (int64_t w = 0; w < nw; ++w) out[w] = at_w[w] < 0 ? Number16(0) : line[at_w[w]];
          }
      }
    }
  }
};

// Computes one of the arrays from windows of the other, some images at a time.
void make(Products& work, const Geometry& g, const Number16* weight, const Number16* from, bool from_large,
          float* to) {
  const Windows windows(g, from_large);
  const Images &seen = windows.seen, &made = windows.places;
  const int64_t taps = g.taps(), plane = made.plane(), in = seen.channels / g.groups,
                out = made.channels / g.groups, depth = in * taps;
  const int64_t most = std::min(std::max<int64_t>(1, kGathered / (depth * plane)), made.batch);
  Number16* gathered = work.numbers16(depth * most * plane);
  float* product = work.floats_for(out * most * plane);
  // The weight is (channels of small, channels of large, taps), transposed if small is gathered.
  Number16* turned = from_large ? nullptr : work.numbers16(out * depth);
  for (int64_t group = 0; group < g.groups; ++group) {
    const Number16* w = weight + group * g.small_channels() * g.large_channels() * taps;
    if (turned) {
      for (int64_t o = 0; o < out; ++o)
        for (int64_t i = 0; i < in; ++i)
          std::memcpy(turned + (o * in + i) * taps, w + (i * out + o) * taps, taps * sizeof(Number16));
      w = turned;
    }
    for (int64_t image = 0; image < made.batch; image += most) {
      const int64_t images = std::min(most, made.batch - image), columns = images * plane;
      windows.gather(from, group * in, in, image, images, gathered);
      work.product(out, columns, depth, {w, depth, 1}, {gathered, columns, 1},
                   {product, columns, 1});
      for (int64_t o = 0; o < out; ++o)
        for (int64_t i = 0; i < images; ++i)
          std::memcpy(to + ((image + i) * made.channels + group * out + o) * plane,
                      product + o * columns + i * plane, plane * sizeof(float));
    }
  }
}

// Computes the weight's gradient, some channels of the large array at a time.
void make_weight(Products& work, const Geometry& g, const Number16* large, const Number16* small,
                 float* to) {
  const Windows windows(g, true);
  const int64_t taps = g.taps(), plane = g.small.plane(), depth = g.small.batch * plane,
                in = g.large_channels(), out = g.small_channels();
  const int64_t most = std::min(std::max<int64_t>(1, kGathered / (depth * taps + 1)), in);
  Number16* gathered = work.numbers16(most * taps * depth);
  Number16* lines = work.numbers16(out * depth);  // small, with its channels first
  for (int64_t group = 0; group < g.groups; ++group) {
    for (int64_t o = 0; o < out; ++o)
      for (int64_t i = 0; i < g.small.batch; ++i)
        std::memcpy(lines + (o * g.small.batch + i) * plane,
                    small + (i * g.small.channels + group * out + o) * plane,
                    plane * sizeof(Number16));
    for (int64_t channel = 0; channel < in; channel += most) {
      const int64_t channels = std::min(most, in - channel);
      windows.gather(large, group * in + channel, channels, 0, g.small.batch, gathered);
      work.product(out, channels * taps, depth, {lines, depth, 1}, {gathered, 1, depth},
                   {to + (group * out * in + channel) * taps, in * taps, 1});
    }
  }
}

void add_bias(Products& work, const Number16* bias, const Images& y, float* to) {
  float* wide = work.floats_for(y.channels);
  float16_kernels->widen(bias, wide, y.channels);
  for (int64_t i = 0; i < y.batch * y.channels; ++i)
    for (int64_t p = 0; p < y.plane(); ++p) to[i * y.plane() + p] += wide[i % y.channels];
}

// A float32 sum over batch and positions, which is not a product.
void sum_bias(Products& work, const Number16* gradient, const Images& y, float* to) {
  float* plane = work.floats_for(y.plane());
  for (int64_t i = 0; i < y.batch * y.channels; ++i) {
    float16_kernels->widen(gradient + i * y.plane(), plane, y.plane());
    float sum = 0;
    for (int64_t p = 0; p < y.plane(); ++p) sum += plane[p];
    to[i % y.channels] += sum;
  }
}

// Reads data, weight, bias; a deconvolution computes the large array.
template <bool deconvolution> void forward(const Call& call) {
  Products work(call);
  const TBlob &x = call.in[0], &y = call.out[0];
  const Geometry g(call.attrs, deconvolution ? y : x, deconvolution ? x : y);
  float* to = work.result(0);
  make(work, g, numbers16(call.in[1]), numbers16(x), !deconvolution, to);
  if (call.in.size() > 2) add_bias(work, numbers16(call.in[2]), Images(y), to);
  work.finish();
}

// Reads the gradient of y, data, weight, bias.
template <bool deconvolution> void backward(const Call& call) {
  Products work(call);
  const TBlob &y = call.in[0], &x = call.in[1];
  const Geometry g(call.attrs, deconvolution ? y : x, deconvolution ? x : y);
  if (work.wants(0))
    make(work, g, numbers16(call.in[2]), numbers16(y), deconvolution, work.result(0));
  if (work.wants(1))
    make_weight(work, g, numbers16(deconvolution ? y : x), numbers16(deconvolution ? x : y),
                work.result(1));
  if (call.out.size() > 2 && work.wants(2))
    sum_bias(work, numbers16(y), Images(y), work.result(2));
  work.finish();
}

}  // namespace

void add_tensor_core_convolutions(Emulation& to) {
  to.products.insert({{"Convolution", forward<false>}, {"_backward_Convolution", backward<false>},
               {"Deconvolution", forward<true>}, {"_backward_Deconvolution", backward<true>}});
}

}  // namespace gluon_amp

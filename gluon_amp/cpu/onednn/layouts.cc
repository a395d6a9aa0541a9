// Arrays in oneDNN's layout: their description, and their copy to plain arrays.
#include <stdlib.h>

#include <algorithm>
#include <cstring>

#include "dispatch/watch.h"

namespace gluon_amp {

int channels_together() {
  static const int size = [] {
    const char* most = std::getenv("DNNL_MAX_CPU_ISA");
    const bool wide = !most || !std::strcmp(most, "ALL") || !std::strncmp(most, "AVX512_CORE", 11);
    return wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
               ? 16 : 8;
  }();
  return size;
}

mkldnn::memory::desc onednn_layout(const mxnet::TShape& shape, int together) {
  mkldnn::memory::desc result;
  std::memset(&result.data, 0, sizeof result.data);
  auto& d = result.data;
  d.ndims = shape.ndim();
  d.data_type = dnnl_f32;
  d.format_kind = dnnl_blocked;
  for (int k = 0; k < d.ndims; ++k) d.dims[k] = d.padded_dims[k] = shape[k];
  d.padded_dims[1] = (shape[1] + together - 1) / together * together;
  auto& b = d.format_desc.blocking;
  b.inner_nblks = 1;
  b.inner_blks[0] = together;
  b.inner_idxs[0] = 1;
  dnnl_dim_t stride = together;
  for (int k = d.ndims; k-- > 2; stride *= shape[k]) b.strides[k] = stride;
  b.strides[1] = stride;
  b.strides[0] = stride * (d.padded_dims[1] / together);
  return result;
}

int channels_together(const NDArray& array, const mxnet::TShape& shape) {
  if (!array.IsMKLDNNData()) return 0;
  const auto& d = description(array.GetMKLDNNData());
  const auto& b = d.format_desc.blocking;
  const auto together = static_cast<int>(b.inner_blks[0]);
  if (d.ndims < 3 || d.ndims != shape.ndim() || d.format_kind != dnnl_blocked || b.inner_nblks != 1 ||
      b.inner_idxs[0] != 1 || d.offset0 != 0 || (together != 16 && together != 8))
    return 0;
  const mkldnn::memory::desc expected = onednn_layout(shape, together);
  const auto& strides = expected.data.format_desc.blocking.strides;
  return std::equal(strides, strides + d.ndims, b.strides) ? together : 0;
}

void narrow(const NDArray& array, const TBlob& to, Write write) {
  if (write == kNothing || size(to) == 0) return;
  const int together = channels_together(array, to.shape_);
  if (!together) {
    const NDArray plain = array.IsMKLDNNData() ? array.Reorder2Default() : array;
    return narrow(floats(plain.data()), to, write);
  }
  const auto& d = description(array.GetMKLDNNData());
  const auto& b = d.format_desc.blocking;
  const int64_t batch = d.dims[0], channels = d.dims[1], plane = b.strides[1] / together;
  const auto* from = static_cast<const float*>(array.storage_handle().dptr);
  // A watched node runs some images, or some channels of an image, at a time.
  const int64_t stored = b.strides[0], most = watching() ? counted_at_a_time() : batch * stored;
  const int64_t images = std::max<int64_t>(1, most / stored);
  const int64_t some = std::max<int64_t>(1, most / b.strides[1]) * together;
  for (int64_t n = 0; n < batch; n += images)
    for (int64_t c = 0; c < channels; c += some) {
      const int64_t many = std::min(images, batch - n), of_each = std::min(some, channels - c);
      const int64_t count = many * ((of_each + together - 1) / together) * b.strides[1];
      const float* const exact = from + n * stored + c * plane;
      void* const rounded = at(to, (n * channels + c) * plane);
      if (is_16bit(to)) count_exact(exact, count, count - many * of_each * plane, rounded, to.type_flag_);
      kernels_of(to)->narrow_from_layout(exact, rounded, many, of_each, plane, together, write);
    }
}

}  // namespace gluon_amp

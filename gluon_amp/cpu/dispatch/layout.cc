// Arrays in oneDNN's layout between layers.
//
// graph/onednn_layouts.py selects them. Their shapes and sizes are those of plain arrays. Hand-written kernels that
// support the layout (kLayout, kAnyOrder) read and write it; all other code gets plain copies.
#include "dispatch/layout.h"

namespace gluon_amp {
namespace {

// Whether oneDNN's layout of an array differs from the plain one.
bool has_layout(const TBlob& array) {
  return is_16bit(array) && array.ndim() > 2 && array.shape_[1] % kTogether == 0 &&
         array.shape_.ProdShape(2, array.ndim()) > 1;
}

int64_t places_of(const TBlob& array) { return array.shape_.ProdShape(2, array.ndim()); }

// A plain array into one in oneDNN's layout.
void put_in_layout(const TBlob& plain, const TBlob& to, Write write) {
  if (write == kStore) return to_layout(plain, numbers16(to));
  Scratch scratch;
  const TBlob converted = scratch.like(plain);
  to_layout(plain, numbers16(converted));
  put(converted.dptr_, to, write);
}

}  // namespace

InLayout::InLayout(const Settings& settings, const std::vector<TBlob>& ins, const std::vector<TBlob>& outs) {
  const Layouts& layouts = settings.layouts;
  if (!layouts.any()) return;
  for (size_t i = 0; i < ins.size(); ++i)
    in.push_back(letter_at(layouts.inputs, i, '0') == '1' && has_layout(ins[i]));
  for (size_t i = 0; i < outs.size(); ++i)
    out.push_back(letter_at(layouts.outputs, i, '0') == '1' && has_layout(outs[i]));
}

bool InLayout::any() const {
  return std::count(in.begin(), in.end(), true) + std::count(out.begin(), out.end(), true) > 0;
}

bool InLayout::all() const {
  return std::count(in.begin(), in.end(), false) + std::count(out.begin(), out.end(), false) == 0;
}

void to_layout(const TBlob& plain, Number16* to) {
  const int64_t places = places_of(plain);
  bfloat16_kernels->transpose(numbers16(plain), to, size(plain) / (kTogether * places), kTogether, places);
}

void to_plain(const TBlob& from, Number16* to) {
  const int64_t places = places_of(from);
  bfloat16_kernels->transpose(numbers16(from), to, size(from) / (kTogether * places), places, kTogether);
}

void narrow_to_layout(const NDArray& from, const TBlob& to, Write write) {
  if (channels_together(from, to.shape_) == kTogether)
    return kernels_of(to)->narrow(static_cast<const float*>(from.storage_handle().dptr), numbers16(to), size(to),
                                  write);
  Scratch scratch;
  const TBlob plain = scratch.like(to);
  narrow(from, plain, kStore);
  put_in_layout(plain, to, write);
}

void in_plain(const Call& call, const std::function<void(const Call&)>& run) {
  Scratch scratch;
  std::vector<TBlob> in(call.in), out(call.out);
  std::vector<OpReqType> req(call.req);
  for (size_t i = 0; i < in.size(); ++i) {
    if (!call.in_layout.input(i)) continue;
    in[i] = scratch.like(call.in[i]);
    to_plain(call.in[i], numbers16(in[i]));
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (!call.in_layout.output(i) || call.write(i) == kNothing) continue;
    out[i] = scratch.like(call.out[i]);
    req[i] = mxnet::kWriteTo;
  }
  run(call.on(in, req, out));
  for (size_t i = 0; i < out.size(); ++i)
    if (out[i].dptr_ != call.out[i].dptr_) put_in_layout(out[i], call.out[i], call.write(i));
}

}  // namespace gluon_amp

// Arrays in blocks of 16 channels between layers.
//
// graph/onednn_layouts.py selects them. Their shapes and sizes are those of plain arrays. Hand-written kernels that
// support blocks (kBlocks, kAnyOrder) read and write them; all other code gets plain copies.
#include "dispatch/blocks.h"

namespace gluon_amp {
namespace {

// Whether blocks of an array differ from its plain layout.
bool has_blocks(const TBlob& array) {
  return is_16bit(array) && array.ndim() > 2 && array.shape_[1] % kBlock == 0 &&
         array.shape_.ProdShape(2, array.ndim()) > 1;
}

int64_t places_of(const TBlob& array) { return array.shape_.ProdShape(2, array.ndim()); }

// A plain array into one in blocks.
void put_in_blocks(const TBlob& plain, const TBlob& to, Write write) {
  if (write == kStore) return block(plain, numbers16(to));
  Scratch scratch;
  const TBlob blocks = scratch.like(plain);
  block(plain, numbers16(blocks));
  put(blocks.dptr_, to, write);
}

}  // namespace

Blocked::Blocked(const Settings& settings, const std::vector<TBlob>& ins, const std::vector<TBlob>& outs) {
  const Layouts& layouts = settings.layouts;
  if (!layouts.any()) return;
  for (size_t i = 0; i < ins.size(); ++i)
    in.push_back(letter_at(layouts.inputs, i, '0') == '1' && has_blocks(ins[i]));
  for (size_t i = 0; i < outs.size(); ++i)
    out.push_back(letter_at(layouts.outputs, i, '0') == '1' && has_blocks(outs[i]));
}

bool Blocked::any() const {
  return std::count(in.begin(), in.end(), true) + std::count(out.begin(), out.end(), true) > 0;
}

bool Blocked::all() const {
  return std::count(in.begin(), in.end(), false) + std::count(out.begin(), out.end(), false) == 0;
}

void block(const TBlob& plain, Number16* blocks) {
  const int64_t places = places_of(plain);
  bfloat16_kernels->transpose(numbers16(plain), blocks, size(plain) / (kBlock * places), kBlock, places);
}

void unblock(const TBlob& blocks, Number16* plain) {
  const int64_t places = places_of(blocks);
  bfloat16_kernels->transpose(numbers16(blocks), plain, size(blocks) / (kBlock * places), places, kBlock);
}

void narrow_to_blocks(const NDArray& from, const TBlob& to, Write write) {
  if (block_of(from, to.shape_) == kBlock)
    return kernels_of(to)->narrow(static_cast<const float*>(from.storage_handle().dptr), numbers16(to), size(to),
                                  write);
  Scratch scratch;
  const TBlob plain = scratch.like(to);
  narrow(from, plain, kStore);
  put_in_blocks(plain, to, write);
}

void in_plain(const Call& call, const std::function<void(const Call&)>& run) {
  Scratch scratch;
  std::vector<TBlob> in(call.in), out(call.out);
  std::vector<OpReqType> req(call.req);
  for (size_t i = 0; i < in.size(); ++i) {
    if (!call.blocked.input(i)) continue;
    in[i] = scratch.like(call.in[i]);
    unblock(call.in[i], numbers16(in[i]));
  }
  for (size_t i = 0; i < out.size(); ++i) {
    if (!call.blocked.output(i) || call.write(i) == kNothing) continue;
    out[i] = scratch.like(call.out[i]);
    req[i] = mxnet::kWriteTo;
  }
  run(call.on(in, req, out));
  for (size_t i = 0; i < out.size(); ++i)
    if (out[i].dptr_ != call.out[i].dptr_) put_in_blocks(out[i], call.out[i], call.write(i));
}

}  // namespace gluon_amp

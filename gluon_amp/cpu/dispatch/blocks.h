// 16-bit arrays whose channels are in blocks of 16, the layout of oneDNN's convolutions.
#pragma once
#include "engine.h"

namespace gluon_amp {

constexpr int64_t kBlock = 16;

// Copies of arrays of images: of a plain one in blocks, and of one in blocks plain.
void block(const TBlob& plain, Number16* blocks);
void unblock(const TBlob& blocks, Number16* plain);

// An operator's float32 result, plain or in oneDNN's blocks, into an array in blocks, which rounds it.
void narrow_to_blocks(const NDArray& from, const TBlob& to, Write write);

// run(call) with plain copies of the arrays that are in blocks.
void in_plain(const Call& call, const std::function<void(const Call&)>& run);

}  // namespace gluon_amp

// The layout of oneDNN's convolutions: 16 channels are adjacent.
#pragma once
#include "engine.h"

namespace gluon_amp {

constexpr int64_t kTogether = 16;

// Copies of arrays of images: of a plain one in the layout, and of one in the layout plain.
void to_layout(const TBlob& plain, Number16* to);
void to_plain(const TBlob& from, Number16* to);

// An operator's float32 result, plain or in the layout, into an array in the layout, which rounds it.
void narrow_to_layout(const NDArray& from, const TBlob& to, Write write);

// run(call) with plain copies of the arrays that are in the layout.
void in_plain(const Call& call, const std::function<void(const Call&)>& run);

}  // namespace gluon_amp

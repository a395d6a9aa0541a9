// Arrays a piece at a time; layers with weights, a piece of the batch at a time.
#pragma once
#include <functional>

#include "own.h"

namespace gluon_amp {

// The numbers of an array from place `first` on, in this shape.
TBlob part(const TBlob& whole, int64_t first, const mxnet::TShape& shape);

// ---- images, whose second axis has the channels

bool has_channels_first(const Call& call);

// Whether oneDNN keeps so many channels in blocks.
bool in_blocks_of(int64_t channels, int64_t groups);

// As many floats as a piece takes, in oneDNN's blocks, too.
int64_t room(const mxnet::TShape& shape);

// Float32 of a piece in the memory of `holder`, in blocks where oneDNN keeps its channels so.
NDArray widened_images(int64_t groups, const NDArray& holder, const TBlob& piece);

// ---- a piece at a time

// Makes float32 of a piece, halves or floats, in the memory of `holder`.
using Widen = std::function<NDArray(const NDArray& holder, const TBlob& piece)>;

// Runs a layer's float32 code, forward or backward, on `some` of the first axis at a time. Weights
// are widened once; their gradients are added up in float32 over the pieces and rounded once.
// x and y: shapes of the layer's data and of its result; x_room and y_room: floats that a piece of
// them takes.
void run_in_pieces(const Call& call, bool backward, mxnet::TShape x, mxnet::TShape y, int64_t some,
                   int64_t x_room, int64_t y_room, const Widen& widen);

}  // namespace gluon_amp

// The table of operators: what the engine needs of some operators of MXNet beyond their functions. Python reads
// it, too (library.py: operators).
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace gluon_amp {

enum Trait : unsigned {
  kRunsInMXNet = 1,         // MXNet always runs it
  kMoves = 2,          // it creates or copies values; MXNet's code copies float16 values as fast
  kLeavesOutputs = 4,  // it does not write some outputs, which are initialized to zeros
  kRefusesFloat16 = 8,   // its type inference refuses float16
  kPushesWeight = 16,  // in predictions it reorders its weight in a later task of MXNet's engine
  kHasParameters = 32, // a convolution or a dense layer, or its backward pass (Settings::float32_parameters)
  kForgetsBias = 64,   // oneDNN's code writes the bias gradient (2) only with the weight's (1)
  kCasts = 128,        // its `dtype` is the type of its result
  kLeavesInput = 256,  // it does not write elements of its output that equal the input's
  kRefusesEmpty = 512  // it does not support empty inputs where a result is not empty
};

unsigned traits_of(const std::string& name);
// The inputs of an operator that are moving averages, which it updates.
std::vector<size_t> moving_averages_of(const std::string& name);

}  // namespace gluon_amp

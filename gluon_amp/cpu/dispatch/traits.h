// The engine's columns of the table of operators (graph/operators.py).
#pragma once
#include <cstddef>
#include <string>
#include <vector>

namespace gluon_amp {

enum Trait : unsigned {
  kRunsInMXNet = 1,    // MXNet always runs it: it holds graphs, is asynchronous, copies between devices, compares
                       // pointers, or has outputs of dynamic shapes
  kMoves = 2,          // it creates or copies values; MXNet's code copies float16 values as fast
  kLeavesOutputs = 4,  // a backward pass that does not write some outputs, such as the gradients of labels and
                       // lengths; they are initialized to zeros
  kRefusesFloat16 = 8,   // its type inference refuses float16
  kPushesWeight = 16,  // in predictions it reorders its weight in a later task of MXNet's engine
  kHasParameters = 32, // a convolution or a dense layer, or its backward pass (Settings::float32_parameters)
  kForgetsBias = 64,   // oneDNN's code writes the bias gradient (2) only with the weight's (1)
  kCasts = 128,        // its `dtype` is the type of its result
  kLeavesInput = 256,  // it does not write elements of its output that equal the input's, such as the middle of an
                       // odd width, or images with one channel
  kRefusesEmpty = 512, // it divides by the size of an axis, reads an array that has no elements, or does not
                       // write its result
  kUserCode = 1024,    // it runs the user's Python
  kWidens = 2048,      // MXNet's code widens each 16-bit number
  kRefusesEmptyForIntegers = 4096,
  kChecksIndices = 8192  // with mode=raise
};

struct OperatorRow {
  unsigned traits = 0;
  std::vector<size_t> moving_averages;  // the inputs that are moving averages, which it updates
  std::vector<std::string> refuses_empty_with;  // attributes: kRefusesEmpty, if one of them is true
};

// Reads the columns: for each a line of its name, and a line of operators. Called once, before any other function.
void read_columns(const char* text);

const OperatorRow& row_of(const std::string& name);

}  // namespace gluon_amp

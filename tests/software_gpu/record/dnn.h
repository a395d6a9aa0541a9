// cuDNN: common declarations. Desc has the members of all kinds of descriptors.
#pragma once
#include "record.h"

enum { BAD_PARAM = 3, NOT_SUPPORTED = 9, EXECUTION_FAILED = 8 };  // cuDNN's statuses

struct Clip { bool on = false, keeps_nan = true; double low = 0, high = 0; };  // of LSTM cells

struct Desc {
  int type = -1, format = 0, compute = -1, math = 0, groups = 1, mode = 0, algorithm = 0;
  std::vector<int> dims, strides, pad, stride, dilate, window;
  int hidden = 0, layers = 0, direction = 0, input_mode = 0, projection = 0;  // without projection: hidden
  int input = 0;       // width; 0 before cuDNN 9, which has it in the descriptor
  bool padded = false;
  Clip clip;
  Desc* drops = nullptr;
  float dropout = 0;
  size_t bytes() const;
  void contiguous();
};
typedef Desc* D;
typedef const void* V;

// Checks the memory of a call's tensor, and records its type.
struct T { const char* name; D desc; V data; };

std::string list(const std::vector<int>& v);
std::string tensor(const char* name, const Desc* d);
const char* math_name(int m);
bool fits(const char* call, const T& t);
int call_with(const char* call, std::initializer_list<T> tensors, const std::string& more = "");
// The same for tensors that must have the same type.
int call_with_one_type(const char* call, std::initializer_list<T> tensors, const std::string& more = "");
// Such a call, which a computing GPU executes by f.
template <class F> int computed(const char* call, std::initializer_list<T> tensors, F f, const std::string& more = "") {
  return then_compute(call, call_with_one_type(call, tensors, more), EXECUTION_FAILED, f);
}

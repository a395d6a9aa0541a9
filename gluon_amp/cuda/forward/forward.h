// A library of CUDA 11 or cuDNN 8, as libmxnet.so loads it, whose functions call those of a newer library. setup.py
// compiles one for each name. FUNCTIONS is a generated file: a line FUNCTION(name) for each function of functions.txt.
#pragma once

struct Function {
  void* target;  // the newer library's function
  const char* name;
};

#define FUNCTION(name) extern "C" __attribute__((visibility("hidden"))) Function forward_##name;
#include FUNCTIONS
#undef FUNCTION

#define API extern "C" __attribute__((visibility("default")))

// The address of a function in the newer library, or null.
extern "C" void* forward_symbol(const char* name);

// Each has a default in forward.cc, which a library may replace.

// Translates what a function returns.
extern "C" unsigned long long forward_result(unsigned long long result);
// The result of a function that the newer library lacks.
extern "C" int forward_missing(const char* name);

// A computing GPU: executes the calls of the recording GPU on the host, synchronously and in order.
//
//   RECORDING_GPU_COMPUTES=1       execute kernels and library calls; device memory is host memory
//
// Results are computed in double or float32, and rounded to an array's type when they are stored. An unknown
// operation is a violation that names it.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "../record/record.h"

bool computes();

// ---- numbers

enum class Type { kFloat, kDouble, kHalf, kBool, kUint8, kInt8, kInt32, kInt64 };
size_t width(Type type);
extern const float* const g_halves;  // the values of all 65,536
uint16_t to_half(float value);
inline float as_half(float value) { return g_halves[to_half(value)]; }

struct Array {
  Type type;
  void* data;

  double operator[](ll i) const {
    switch (type) {
      case Type::kFloat: return ((const float*)data)[i];
      case Type::kDouble: return ((const double*)data)[i];
      case Type::kHalf: return g_halves[((const uint16_t*)data)[i]];
      case Type::kInt32: return ((const int32_t*)data)[i];
      case Type::kInt64: return (double)((const int64_t*)data)[i];
      case Type::kInt8: return ((const int8_t*)data)[i];
      default: return ((const uint8_t*)data)[i];
    }
  }
  void set(ll i, double value) const {
    switch (type) {
      case Type::kFloat: ((float*)data)[i] = (float)value; break;
      case Type::kDouble: ((double*)data)[i] = value; break;
      case Type::kHalf: ((uint16_t*)data)[i] = to_half((float)value); break;
      case Type::kInt32: ((int32_t*)data)[i] = (int32_t)value; break;
      case Type::kInt64: ((int64_t*)data)[i] = (int64_t)value; break;
      case Type::kInt8: ((int8_t*)data)[i] = (int8_t)value; break;
      case Type::kBool: ((bool*)data)[i] = value != 0; break;
      default: ((uint8_t*)data)[i] = (uint8_t)value;
    }
  }
  // MXNet's requests: 0 no output, 1 and 2 write, 3 add.
  void assign(ll i, int request, double value) const {
    if (request == 3) set(i, (*this)[i] + rounded(value));
    else if (request) set(i, value);
  }
  double rounded(double value) const {  // to the array's type
    return type == Type::kHalf ? as_half((float)value) : type == Type::kFloat ? (float)value : value;
  }
};

// ---- names: a demangled type or function, without namespaces

struct Name {
  std::string id;           // "mul", "1", "float"
  std::vector<Name> args;   // of the template
  bool pointer = false;
  int type = -1;            // a Type, if the name is a numeric type
};

struct Signature {  // a kernel's template arguments and parameter types
  Name kernel;
  std::vector<Name> types;
};

struct Launch {
  const Name& kernel;
  const std::vector<Name>& types;
  void** args;
  unsigned grid[3], block[3];

  template <class T> const T& value(size_t i) const { return *(const T*)args[i]; }
  double number(size_t i) const;  // a scalar argument
  ll integer(size_t i) const { return (ll)number(i); }
  Array array(size_t i) const;    // the array of a pointer
};

Type type_of(const Name& name);
inline bool is_type(const Name& name) { return name.type >= 0; }

using Run = std::function<void(const Launch&)>;
std::map<std::string, Run>& kernels();            // by name, without namespaces
std::map<std::string, Run>& generic_kernels();    // mxnet_generic_kernel, by operation
struct Family {  // registers kernels when the library is loaded
  Family(std::map<std::string, Run>& table, std::initializer_list<std::pair<const std::string, Run>> rows) {
    for (auto& row : rows) table.insert(row);
  }
};

using UnaryFunction = double (*)(double);
using BinaryFunction = double (*)(double, double);
UnaryFunction unary_function(const std::string& name);
BinaryFunction binary_function(const std::string& name);

// Throws std::runtime_error that names the unknown operation.
void compute(const std::string& demangled, const unsigned grid[3], const unsigned block[3], void** args);
[[noreturn]] void unknown(const std::string& what);

// ---- products

enum class Sums { kFloat, kHalf };

// c (m x n) = a (m x k) * b (k x n), all row-major and dense.
void product(ll m, ll n, ll k, const float* a, const float* b, float* c, Sums sums);
std::vector<float> transposed(const float* x, ll rows, ll columns);

// Softmax of n numbers, or its logarithm: read(i) returns the i-th, write(i, result) stores it.
template <class Read, class Write> void soft_max(ll n, bool log, Read read, Write write) {
  double most = -INFINITY, total = 0;
  for (ll i = 0; i < n; i++) most = std::max<double>(most, read(i));
  for (ll i = 0; i < n; i++) total += std::exp(read(i) - most);
  for (ll i = 0; i < n; i++) {
    const double x = read(i) - most;
    write(i, log ? x - std::log(total) : std::exp(x) / total);
  }
}
// Its gradient, from the results out(i) and their gradients.
template <class Read, class Gradient, class Write>
void soft_max_gradient(ll n, bool log, Read out, Gradient gradient, Write write) {
  double total = 0;
  for (ll i = 0; i < n; i++) total += log ? gradient(i) : gradient(i) * out(i);
  for (ll i = 0; i < n; i++)
    write(i, log ? gradient(i) - std::exp(out(i)) * total : out(i) * (gradient(i) - total));
}

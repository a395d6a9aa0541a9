// Numbers of float16, products of matrices, and names of kernels.
#include "compute.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <stdexcept>

bool computes() {
  static const bool on = number("RECORDING_GPU_COMPUTES", 0);
  return on;
}

size_t width(Type type) {
  static const size_t bytes[] = {4, 8, 2, 1, 1, 1, 4, 8};
  return bytes[(int)type];
}

static float from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                    : std::ldexp(float(exponent ? fraction + 1024 : fraction), std::max(exponent, 1) - 25);
  return bits & 0x8000 ? -size : size;
}

static const float* all_halves() {
  auto* made = new float[65536];
  for (int i = 0; i < 65536; i++) made[i] = from_half(i);
  return made;
}
const float* const g_halves = all_halves();

uint16_t to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint16_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;  // rounds to 65536
  if (bits < 0x38800000) {                       // subnormal: adding 0.5 rounds at float16's last place
    float size, half = 0.5f;
    memcpy(&size, &bits, sizeof size);
    size += half;
    memcpy(&bits, &size, sizeof bits);
    return sign | (bits - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1) - (112 << 23);
  return sign | bits >> 13;
}

// ---- products

__attribute__((target_clones("avx512f", "avx2", "default")))
static void add_rows(ll n, ll k, const float* a, const float* b, float* c) {
  for (ll l = 0; l < k; l++) {
    const float factor = a[l];
    const float* row = b + l * n;
    for (ll j = 0; j < n; j++) c[j] += factor * row[j];
  }
}

std::vector<float> transposed(const float* x, ll rows, ll columns) {
  std::vector<float> made(rows * columns);
  for (ll i = 0; i < rows; i++)
    for (ll j = 0; j < columns; j++) made[j * rows + i] = x[i * columns + j];
  return made;
}

void product(ll m, ll n, ll k, const float* a, const float* b, float* c, Sums sums) {
  const ll some = 128;  // rows of b that stay in the cache
  std::fill(c, c + m * n, 0.0f);
  if (sums == Sums::kHalf) {
    for (ll i = 0; i < m; i++)
      for (ll l = 0; l < k; l++)
        for (ll j = 0; j < n; j++) c[i * n + j] = as_half(c[i * n + j] + a[i * k + l] * b[l * n + j]);
  } else {
    for (ll l = 0; l < k; l += some)
      for (ll i = 0; i < m; i++) add_rows(n, std::min(some, k - l), a + i * k + l, b + l * n, c + i * n);
  }
}

// ---- names

namespace {

const std::map<std::string, Type>& types() {
  static const auto& all = *new std::map<std::string, Type>{
      {"float", Type::kFloat}, {"double", Type::kDouble}, {"half_t", Type::kHalf}, {"half2_t", Type::kHalf},
      {"__half", Type::kHalf}, {"bool", Type::kBool}, {"unsigned char", Type::kUint8}, {"signed char", Type::kInt8},
      {"char", Type::kInt8}, {"int", Type::kInt32}, {"unsigned int", Type::kInt32}, {"long", Type::kInt64},
      {"unsigned long", Type::kInt64}, {"OpReqType", Type::kInt32}};
  return all;
}

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Name name() {
    Name made;
    std::string id;
    for (; at_ < text_.size(); at_++) {
      const char c = text_[at_];
      if (c == '<') {
        made.args = list('>');
        if (text_.compare(at_, 2, "::") != 0) { finish(&made); break; }
        made.args.clear();  // a type within a template
        id.clear();
        at_++;
      } else if (c == '(') {
        if (text_.compare(at_, 23, "(anonymous namespace)::") == 0) { at_ += 22; continue; }
        const size_t close = text_.find(')', at_);  // the type of a constant: (mxnet::OpReqType)1
        if (!id.empty() || close == std::string::npos) break;
        at_ = close;
      } else if (c == ':') {
        id.clear();
        at_++;
      } else if (c == ',' || c == '>' || c == ')') {
        break;
      } else if (c == '*') {
        made.pointer = true;
      } else if (c != '&') {
        id += c;
      }
    }
    made.id = id;
    trim(&made.id);
    if (types().count(made.id)) made.type = (int)types().at(made.id);
    return made;
  }

  std::vector<Name> list(char close) {  // from an opening bracket past the closing one
    std::vector<Name> made;
    at_++;
    while (at_ < text_.size() && text_[at_] != close) {
      made.push_back(name());
      if (at_ < text_.size() && text_[at_] == ',') at_++;
    }
    at_++;
    return made;
  }
  bool at(char c) const { return at_ < text_.size() && text_[at_] == c; }

 private:
  void finish(Name* made) {  // " const*" and the like after template arguments
    for (; at_ < text_.size(); at_++) {
      const char c = text_[at_];
      if (c == '*') made->pointer = true;
      else if (c == ',' || c == '>' || c == ')' || c == '(') break;
    }
  }
  static void trim(std::string* id) {
    for (const char* word : {"const", "volatile", "void "}) {
      size_t found;
      while ((found = id->find(word)) != std::string::npos && (found == 0 || (*id)[found - 1] == ' '))
        id->erase(found, strlen(word));
    }
    while (!id->empty() && id->front() == ' ') id->erase(0, 1);
    while (!id->empty() && id->back() == ' ') id->pop_back();
  }
  const std::string& text_;
  size_t at_ = 0;
};


}  // namespace

Type type_of(const Name& name) {
  if (!is_type(name)) unknown("type " + name.id);
  return (Type)name.type;
}

static Signature parsed(const std::string& text) {
  Parser parser(text);
  Signature made;
  made.kernel = parser.name();
  if (!parser.at('(')) unknown("kernel");
  made.types = parser.list(')');
  return made;
}

double Launch::number(size_t i) const { return Array{type_of(types.at(i)), args[i]}[0]; }
Array Launch::array(size_t i) const { return {type_of(types.at(i)), *(void**)args[i]}; }

std::map<std::string, Run>& kernels() { static auto& all = *new std::map<std::string, Run>(); return all; }
std::map<std::string, Run>& generic_kernels() { static auto& all = *new std::map<std::string, Run>(); return all; }

void unknown(const std::string& what) { throw std::runtime_error("unknown: " + what); }

void compute(const std::string& demangled, const unsigned grid[3], const unsigned block[3], void** args) {
  static auto& known = *new std::map<std::string, Signature>();  // never erased: launches refer to them
  const auto signature = [&]() -> const Signature& {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto found = known.find(demangled);
    return found != known.end() ? found->second : known.emplace(demangled, parsed(demangled)).first->second;
  };
  const Signature& of = signature();
  const Launch launch{of.kernel, of.types, args, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}};
  const bool generic = launch.kernel.id.rfind("mxnet_generic_kernel", 0) == 0;
  auto& table = generic ? generic_kernels() : kernels();
  const std::string& id = generic ? launch.kernel.args.at(0).id : launch.kernel.id;
  auto found = table.find(id);
  if (found == table.end()) unknown("kernel");
  found->second(launch);
}

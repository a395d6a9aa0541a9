// Elementwise operators with hand-written kernels: activations, arithmetic. Others run the generic operator in
// pieces.
#include "operators/pieces.h"

namespace gluon_amp {
namespace {

bool unary(const Call& call, Unary f, float a = 0, float b = 0) {
  if (!has_kernels(call)) return false;
  const TBlob &x = call.in[0], &y = call.out[0];
  kernels_of(y)->unary(f, x.dptr_, y.dptr_, size(y), a, b, call.write(0));
  return true;
}

// in[0] is the gradient; `read`: the input that holds x or y, whichever the kernel reads
bool unary_gradient(const Call& call, Unary f, size_t read, float a = 0, float b = 0) {
  if (!has_kernels(call)) return false;
  const TBlob &g = call.in[0], &d = call.out[0];
  kernels_of(d)->unary_gradient(f, g.dptr_, call.in[read].dptr_, d.dptr_, size(d), a, b, call.write(0));
  return true;
}

template <Unary f> bool forward(const Call& call) { return unary(call, f); }
template <Unary f> bool backward(const Call& call) { return unary_gradient(call, f, 1); }

bool activation(const Call& call) {
  const std::string type = word(call.attrs, "act_type", "");
  return (type == "relu" && forward<kReluOf>(call)) || (type == "sigmoid" && forward<kSigmoidOf>(call)) ||
         (type == "tanh" && forward<kTanhOf>(call));
}

bool activation_gradient(const Call& call) {  // of y; of y and x for all but relu
  const std::string type = word(call.attrs, "act_type", "");
  return (type == "relu" && backward<kReluOf>(call)) || (type == "sigmoid" && backward<kSigmoidOf>(call)) ||
         (type == "tanh" && backward<kTanhOf>(call));
}

bool leaky(const Call& call) {
  const std::string type = word(call.attrs, "act_type", "leaky");
  const float slope = number(call.attrs, "slope", 0.25f);
  if (type == "gelu") return unary(call, kGeluOf);
  return type == "leaky" && slope > 0 && unary(call, kLeakyOf, slope);
}

bool leaky_gradient(const Call& call) {  // gradient, x, y
  const std::string type = word(call.attrs, "act_type", "leaky");
  const float slope = number(call.attrs, "slope", 0.25f);
  if (call.in.size() != 3) return false;
  if (type == "gelu") return unary_gradient(call, kGeluOf, 1);
  return type == "leaky" && slope > 0 && unary_gradient(call, kLeakyOf, 2, slope);
}

bool clip(const Call& call) {
  return unary(call, kClipOf, number(call.attrs, "a_min", 0), number(call.attrs, "a_max", 0));
}

bool clip_gradient(const Call& call) {
  return unary_gradient(call, kClipOf, 1, number(call.attrs, "a_min", 0),
                        number(call.attrs, "a_max", 0));
}

template <Unary f, int sign>
bool with_scalar(const Call& call) {
  return unary(call, f, sign * number(call.attrs, "scalar", 1));
}

template <Binary f>
bool binary(const Call& call) {
  if (!has_kernels(call)) return false;
  const TBlob& to = call.out[0];
  kernels_of(to)->binary(f, call.in[0].dptr_, call.in[1].dptr_, to.dptr_, size(to), call.write(0));
  return true;
}

bool product_gradient(const Call& call) {  // gradient, x, y
  if (!has_kernels(call)) return false;
  const TBlob& g = call.in[0];
  kernels_of(g)->product_gradient(g.dptr_, call.in[1].dptr_, call.in[2].dptr_, call.out[0].dptr_, call.write(0),
                                  call.out[1].dptr_, call.write(1), size(g));
  return true;
}

bool sum(const Call& call) {
  if (!all_16bit(call)) return false;
  std::vector<const void*> from;
  for (auto& array : call.in) from.push_back(array.dptr_);
  const TBlob& to = call.out[0];
  kernels_of(to)->sum(from.data(), from.size(), to.dptr_, size(to), call.write(0));
  return true;
}

// The generic operator in pieces, so that its float32 scratch stays in the cache.
bool some_at_a_time(const Call& call) {
  return some_numbers_at_a_time(call, int64_t(1) << 16, [](const Call& piece) {
    run(piece);
    return true;
  });
}

}  // namespace

Rows in_pieces() {
  Rows rows;
  for (const char* name : {
           "abs", "_backward_abs", "sign", "round", "rint", "ceil", "floor", "trunc", "fix",
           "negative", "sqrt", "_backward_sqrt", "square", "_backward_square", "hard_sigmoid",
           "_backward_hard_sigmoid", "softsign", "_backward_softsign", "_maximum_scalar",
           "_backward_maximum_scalar", "_minimum_scalar", "_backward_minimum_scalar", "_maximum",
           "_backward_maximum", "_minimum", "_backward_minimum", "_backward_sub", "_backward_div",
           "where", "_backward_where"})
    rows[name] = {some_at_a_time, kAnyInput};
  return rows;
}

constexpr int kEach = kNumbers | kAnyOrder;
const AddRows rows_in_pieces{in_pieces()};
const AddRows rows{{
    {"relu", {forward<kReluOf>, 1, kAnyOrder}}, {"_backward_relu", {backward<kReluOf>, 2, kAnyOrder}},
    {"sigmoid", {forward<kSigmoidOf>, 1, kEach}}, {"_backward_sigmoid", {backward<kSigmoidOf>, 2, kEach}},
    {"tanh", {forward<kTanhOf>, 1, kEach}}, {"_backward_tanh", {backward<kTanhOf>, 2, kEach}},
    {"Activation", {activation, 1, kEach}}, {"_backward_Activation", {activation_gradient, 2, kEach}},
    {"LeakyReLU", {leaky, 1, kEach}}, {"_backward_LeakyReLU", {leaky_gradient, 2, kEach}},
    {"clip", {clip, 1, kAnyOrder}}, {"_backward_clip", {clip_gradient, 2, kAnyOrder}},
    {"_mul_scalar", {with_scalar<kTimes, 1>, 1, kEach}},
    {"_backward_mul_scalar", {with_scalar<kTimes, 1>, 1, kEach}},
    {"_div_scalar", {with_scalar<kOverOf, 1>, 1, kEach}},
    {"_backward_div_scalar", {with_scalar<kOverOf, 1>, 1, kEach}},
    {"_plus_scalar", {with_scalar<kPlus, 1>, 1, kEach}},
    {"_minus_scalar", {with_scalar<kPlus, -1>, 1, kEach}},
    {"_rminus_scalar", {with_scalar<kFromOf, 1>, 1, kEach}},
    {"elemwise_add", {binary<kSum>, 2, kEach}}, {"_grad_add", {binary<kSum>, 2, kEach}},
    {"add_n", {sum, kAnyInput, kAnyOrder}}, {"elemwise_sub", {binary<kDifference>, 2, kEach}},
    {"elemwise_mul", {binary<kProduct>, 2, kEach}},
    {"_backward_mul", {product_gradient, kAnyInput, kEach}},
    {"elemwise_div", {binary<kQuotient>, 2, kEach}}}};

}  // namespace gluon_amp

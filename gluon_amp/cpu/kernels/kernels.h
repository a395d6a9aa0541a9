// The interface of the kernels: loops over plain memory for each instruction set.
//
// Every file of this folder is compiled for each instruction set and each type of tensors, float16, bfloat16 and
// float32, in its own namespace; `kernels_for` returns its functions. Nothing here depends on MXNet. All kernels run in OpenMP
// threads, accept any size (0 too) and unaligned pointers, and round ties to even.
#pragma once
#include <cstddef>
#include <cstdint>

#include "rnn_cell.h"

namespace gluon_amp {

using Number16 = uint16_t;  // float16 or bfloat16

// Whether a kernel has rounded a finite number above 65504 to float16's infinity. Conversions, sums, products and
// quotients set it; dispatch.cc reads and clears it. Numbers below -65504 do not count: masks have such on purpose.
extern int overflowed;

// Below this count, threads that sleep between loops cost more than they save. With threads that spin, half as
// many numbers would be a few percent faster.
constexpr int64_t kWorthThreads = 131072;

// MXNet's write requests. kAdd rounds the result, adds it to the output in float32, and rounds the sum.
enum Write { kNothing, kStore, kAdd };

enum Unary {  // y = f(x); gradients read what is in brackets
  kReluOf,      // max(x, 0), NaN stays NaN        [y]
  kClipOf,      // a <= x <= b                     [x]
  kSigmoidOf,   // 1 / (1 + exp(-x))               [y]
  kTanhOf,      //                                 [y]
  kGeluOf,      // x * (1 + erf(x / sqrt(2))) / 2  [x]
  kLeakyOf,     // x > 0 ? x : a * x               [y, with a > 0]
  kTimes,       // x * a                           [nothing]
  kPlus,        // x + a                           [nothing]
  kFromOf,      // a - x                           [nothing]
  kOverOf,      // x / a                           [nothing]
};

enum Binary { kSum, kDifference, kProduct, kQuotient };

// A histogram of float32 exponents (bin 127: from 1 to below 2; bin 0: zeros and subnormals; bin 255: infinities
// and NaNs), and the effects of rounding.
struct Counts {  // COUNTS in cpu/library.py
  int64_t bins[256];
  int64_t zero, infinite;       // of bins 0 and 255
  int64_t overflowed, flushed;  // finite, and infinite once rounded; not 0, and 0 once rounded
  double squares, error_squares;  // sums over finite numbers: of their squares, of squared rounding errors
};

// A batch norm of x as (batch, channels, plane), in this order of memory:
//   y = round((x - mean) * gamma / sqrt(var + eps) + beta), or the relu of that
// mean and var are the batch's if `batch_statistics`, else the moving ones.
struct BatchNorm {
  int64_t batch, channels, plane;
  float eps, momentum;
  bool batch_statistics, fix_gamma;  // fix_gamma: gamma is 1, and its gradient is 0
  bool relu;
  bool in_layout;                    // oneDNN's, of 16-bit numbers: with AVX-512, from 16 places on
};

struct BatchNormForward {
  const void* x;
  const float *gamma, *beta;
  float *moving_mean, *moving_var;        // updated if `batch_statistics`
  void* y;  Write write;
  float *mean, *inverse_deviation;        // written: the statistics used; or null
};

struct BatchNormBackward {
  const void *gradient, *x;               // gradient: of y
  const float *gamma, *beta, *mean, *inverse_deviation;
  void* dx;       Write write_dx;
  float* dgamma;  Write write_dgamma;
  float* dbeta;   Write write_dbeta;
};

// Rows of `width` 16-bit numbers, normalized in float32 and rounded once.
struct LayerNorm {
  int64_t rows, width;
  float eps;
};

// One step of a layer over the rows of a batch, between its products.
struct RnnStep {
  int64_t rows, units;
  float* gates;                     // (rows, gates, units): x * Wx, then the gates after their activations
  const float* hidden;              // (rows, gates, units): h * Wh
  const float *bias, *bias_inside;  // of the sums, (gates, units); of a GRU's h * Wh in its last gate
  const float* before;              // (rows, units): an LSTM's cells or a GRU's states before the step
  float* after;                     // the same after the step; may be the same array
  float* inside;                    // (rows, units) for a GRU, written: its last gate's h * Wh with its bias
  void* h;                          // (rows, units) written: the states
  void* y;                          // the same, in rows of y_row numbers
  int64_t y_row;
};

struct RnnStepBack {
  int64_t rows, units;
  const float *gates, *before, *after, *inside;  // inputs and outputs of the step
  const void* dy;                   // the gradient of y
  int64_t dy_row;
  const float* back;                // (rows, units): the gradient through the next step's product; or null
  float *dh, *dc;                   // (rows, units): other gradients from the next step; replaced by this step's
  void *dx, *ds;                    // (rows, gates, units) written: gradients of x * Wx, and of a GRU's h * Wh
};

// The optimizers that update weights in one pass (LAMB in two).
enum Rule { kSgd, kDescent, kNag, kAdam, kAdamW, kRmsProp, kCenteredRmsProp, kLamb };

// One weight with its gradient, master weight and optimizer states. A float32 weight is its own master weight.
struct Update {
  void* weight;
  const void* gradient;
  float* master;
  float* states[3];  // the states of the rule in MXNet's order; SGD may have no momentum
  int64_t n;
  float lr, wd;
  int step;  // the number of the update
  bool follows;  // whether the master weight is synchronized with writes to the weight
};

// The settings of all weights of an optimizer. Each rule reads those that it needs.
struct UpdateSettings {
  float rescale, clip;    // of gradients; no clipping below 0
  float momentum;         // and RMSProp's gamma2
  float beta1, beta2;     // beta1: and RMSProp's gamma1
  float epsilon;
  float clip_weights;     // of RMSProp; no clipping below 0
  float lower, upper;     // bounds of the norms of LAMB's weights; no bound below 0
  bool bias_correction;   // of LAMB
  bool has_momentum;      // whether SGD has a state
};

struct Numbers {
  const void* data;
  int64_t n;
};

// The functions for one type of tensors, whose numbers are `void` here. They compute in float32.
struct Kernels {
  const char* name;

  // ---- between types (passes.cc)
  void (*widen)(const void* from, float* to, int64_t n);
  void (*narrow)(const float* from, void* to, int64_t n, Write write);
  void (*copy)(const void* from, void* to, int64_t bytes);
  // `count` matrices of 16-bit numbers, one after the other, each transposed
  void (*transpose)(const Number16* from, Number16* to, int64_t count, int64_t rows, int64_t columns);
  // converts plain numbers (batch, channels, plane) to and from oneDNN's layout of floats with `together` (8 or 16)
  // channels: (batch, ceil(channels / together), plane, together), padded with 0
  void (*widen_to_layout)(const void* from, float* to, int64_t batch, int64_t channels,
                        int64_t plane, int together);
  void (*narrow_from_layout)(const float* from, void* to, int64_t batch, int64_t channels,
                         int64_t plane, int together, Write write);

  // ---- elementwise (elementwise.cc); y may be x
  void (*unary)(Unary f, const void* x, void* y, int64_t n, float a, float b, Write write);
  // d = g * f'(...); `read` is x or y as listed above; d may be g or `read`
  void (*unary_gradient)(Unary f, const void* g, const void* read, void* d, int64_t n, float a,
                         float b, Write write);
  void (*binary)(Binary f, const void* x, const void* y, void* out, int64_t n, Write write);
  // dx = g * y, dy = g * x; both may be any of the inputs
  void (*product_gradient)(const void* g, const void* x, const void* y, void* dx, Write write_dx,
                           void* dy, Write write_dy, int64_t n);
  // the float32 sum of `count` arrays, rounded once; out may be any of them
  void (*sum)(const void* const* in, int count, void* out, int64_t n, Write write);
  // d = mask is 0: 0; mask is 1: g; else g * scale. d may be g
  void (*dropout_gradient)(const void* g, const void* mask, void* d, int64_t n, float scale,
                           Write write);

  // ---- norms (batch_norm.cc, rows.cc)
  void (*batch_norm)(const BatchNorm&, const BatchNormForward&);
  void (*batch_norm_gradient)(const BatchNorm&, const BatchNormBackward&);
  // mean, deviation (sqrt(var + eps), as MXNet's LayerNorm keeps it): one for each row
  void (*layer_norm)(const LayerNorm&, const void* x, const float* gamma, const float* beta,
                     void* y, Write write, float* mean, float* deviation);
  void (*layer_norm_gradient)(const LayerNorm&, const void* g, const void* x, const float* gamma,
                              const float* mean, const float* deviation, void* dx, Write write_dx,
                              float* dgamma, Write write_dgamma, float* dbeta, Write write_dbeta);

  // ---- sums of products g * x, or of g where x is null (rows.cc)
  double (*dot)(const void* g, const void* x, int64_t n);
  void (*add_products)(const void* g, const void* x, float* sums, int64_t n);  // to each sum its own

  // ---- steps of recurrent layers (rnn.cc), for bfloat16 only
  void (*rnn_step)(RnnMode mode, const RnnStep& step);
  void (*rnn_step_back)(RnnMode mode, const RnnStepBack& step);

  // ---- training (training.cc): master weights, sums of squares
  void (*follow)(float* master, const void* weight, int64_t n);
  void (*squares)(const Numbers* arrays, int count, double* sums);

  // ---- optimizers (updates.cc)
  void (*update)(Rule rule, const Update* updates, int count, const UpdateSettings& settings);

  // ---- counts (counts.cc): adds the counts of n numbers before rounding to the type
  void (*count)(const float* exact, int64_t n, Counts* counts);
  void (*count_rounded)(const void* numbers, int64_t n, Counts* counts);
};

// Of float32; their names are those of the instruction sets.
const Kernels* kernels_for_portable();
const Kernels* kernels_for_avx2();
const Kernels* kernels_for_avx512();
const Kernels* kernels_for_portable_float16();
const Kernels* kernels_for_avx2_float16();
const Kernels* kernels_for_avx512_float16();
const Kernels* kernels_for_portable_bfloat16();
const Kernels* kernels_for_avx2_bfloat16();
const Kernels* kernels_for_avx512_bfloat16();

}  // namespace gluon_amp

// cuDNN: batch norms, activations, poolings, softmax, dropout, samplers.
#include "../compute/libraries.h"

API int cudnnDeriveBNTensorDescriptor(D d, D x, int mode) {
  d->type = x->type == 2 ? 0 : x->type;
  d->dims = x->dims;
  for (size_t i = 0; i < d->dims.size(); i++)
    if (i == 0 || (mode && i >= 2)) d->dims[i] = 1;
  d->contiguous();
  return 0;
}
// Float16 data with float32 statistics, or all of one type.
static int norm_check(const char* call, D x, D y, D p) {
  const bool fit = x->type == y->type && p->type == (x->type == 2 ? 0 : x->type);
  return fit ? 0 : bad(call, "types", NOT_SUPPORTED);
}
static int norm_forward(const char* name, int mode, V alpha, V beta, D xd, V x, D yd, V y, D pd, V g, V b,
                        double factor, V rm, V rv, double epsilon, V sm, V sv, bool relu = false, V z = nullptr) {
  if (int e = norm_check(name, xd, yd, pd)) return e;
  return then_compute(name, call_with(name, {{"x", xd, x}, {"y", yd, y}, {"scale", pd, g}, {"bias", pd, b},
                   {"running_mean", pd, rm}, {"running_var", pd, rv}, {"saved_mean", pd, sm}, {"saved_var", pd, sv}},
            ",\"mode\":" + std::to_string(mode)), EXECUTION_FAILED,
                      [&] {
    norm_training({mode, alpha, beta, xd, pd, epsilon, factor, relu, z}, x, y, g, b, rm, rv, sm, sv);
  });
}
API int cudnnBatchNormalizationForwardTraining(void*, int mode, V alpha, V beta, D xd, V x, D yd, V y, D pd, V g, V b,
                                               double factor, V rm, V rv, double epsilon, V sm, V sv) {
  return norm_forward(__func__, mode, alpha, beta, xd, x, yd, y, pd, g, b, factor, rm, rv, epsilon, sm, sv);
}
API int cudnnBatchNormalizationForwardInference(void*, int mode, V alpha, V beta, D xd, V x, D yd, V y, D pd, V g, V b,
                                                V m, V v, double epsilon) {
  if (int e = norm_check(__func__, xd, yd, pd)) return e;
  return then_compute(__func__, call_with(__func__, {{"x", xd, x}, {"y", yd, y}, {"scale", pd, g}, {"bias", pd, b},
                                             {"mean", pd, m}, {"var", pd, v}}), EXECUTION_FAILED,
                      [&] { norm_inference({mode, alpha, beta, xd, pd, epsilon, 0}, x, y, g, b, m, v); });
}
static int norm_gradients(const char* name, int mode, V alpha, V beta, V alpha_p, V beta_p, D xd, V x, D dyd, V dy,
                          D dxd, V dx, D pd, V g, V dg, V db, double epsilon, V sm, V sv, bool relu = false,
                          V y = nullptr, V dz = nullptr) {
  if (int e = norm_check(name, xd, dxd, pd)) return e;
  return then_compute(name, call_with(name, {{"x", xd, x}, {"dy", dyd, dy}, {"dx", dxd, dx}, {"scale", pd, g},
                   {"dscale", pd, dg}, {"dbias", pd, db}, {"saved_mean", sm ? pd : nullptr, sm},
                   {"saved_var", sv ? pd : nullptr, sv}},
            ",\"mode\":" + std::to_string(mode)), EXECUTION_FAILED, [&] {
              norm_backward({mode, alpha, beta, xd, pd, epsilon, 0, relu}, alpha_p, beta_p, x, y, dy, dz, dx, g, dg, db,
                            sm, sv);
            });
}
API int cudnnBatchNormalizationBackward(void*, int mode, V alpha, V beta, V alpha_p, V beta_p, D xd, V x, D dyd, V dy,
                                        D dxd, V dx, D pd, V g, V dg, V db, double epsilon, V sm, V sv) {
  return norm_gradients(__func__, mode, alpha, beta, alpha_p, beta_p, xd, x, dyd, dy, dxd, dx, pd, g, dg, db, epsilon,
                        sm, sv);
}

// ---- cuDNN's fast kernels for channels-last float16 data need a workspace, with an addition also a reserve space

static const size_t kNormSpace = 1 << 12, kNormReserve = 1 << 9;  // bytes
// `bytes` where these kernels run: with other operations than a batch norm alone, for multiples of 4 channels.
static size_t fast(int mode, int operation, D x, size_t bytes) {
  return mode == 2 && x->type == 2 && x->format == 1 && !(operation && x->dims[1] % 4) ? bytes : 0;
}

API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void*, int mode, int operation, D, D xd, size_t* n) {
  *n = operation == 2 ? fast(mode, operation, xd, kNormReserve) : 0;
  return operation && !fast(mode, operation, xd, 1) ? NOT_SUPPORTED : 0;
}
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void*, int mode, int operation, D xd, D, D, D, D,
                                                                 size_t* n) {
  *n = fast(mode, operation, xd, kNormSpace);
  return operation && !*n ? NOT_SUPPORTED : 0;
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void*, int mode, int operation, D xd, D, D, D, D, D, D,
                                                          size_t* n) {
  *n = fast(mode, operation, xd, kNormSpace);
  return operation && !*n ? NOT_SUPPORTED : 0;
}
// Checks the spaces, and that arrays are given as the operation needs them: a ReLU needs `of_relu`, an addition z.
static int norm_ex_check(const char* call, int mode, int operation, D xd, const T& z, V of_relu, V s, size_t n, V r,
                         size_t rn) {
  if (operation && !fast(mode, operation, xd, 1)) return bad(call, "operation", NOT_SUPPORTED);
  if (n < fast(mode, operation, xd, kNormSpace) || (operation == 2 && rn < kNormReserve))
    return bad(call, "a space is too small");
  if (operation && !of_relu) return bad(call, "an array or descriptor of the ReLU is missing", BAD_PARAM);
  if ((operation == 2) != (z.data != nullptr)) return bad(call, "z", BAD_PARAM);
  if (z.data && !fits(call, z)) return EXECUTION_FAILED;
  return check(call, "workspace", s, n) && check(call, "reserve", r, rn) ? 0 : EXECUTION_FAILED;
}
API int cudnnBatchNormalizationForwardTrainingEx(void*, int mode, int operation, V alpha, V beta, D xd, V x, D zd, V z,
                                                 D yd, V y, D pd, V g, V b, double factor, V rm, V rv, double epsilon,
                                                 V sm, V sv, D relu, V s, size_t n, V r, size_t rn) {
  if (int e = norm_ex_check(__func__, mode, operation, xd, {"z", zd, z}, relu, s, n, r, rn)) return e;
  if (operation == 2 && computes()) *(V*)real(r) = sm;
  return norm_forward(__func__, mode, alpha, beta, xd, x, yd, y, pd, g, b, factor, rm, rv, epsilon, sm, sv, operation,
                      z);
}
API int cudnnBatchNormalizationBackwardEx(void*, int mode, int operation, V alpha, V beta, V alpha_p, V beta_p, D xd,
                                          V x, D, V y, D dyd, V dy, D dzd, V dz, D dxd, V dx, D pd, V g, V b, V dg,
                                          V db, double epsilon, V sm, V sv, D relu, V s, size_t n, V r, size_t rn) {
  V of_relu = relu && b ? y : nullptr;
  if (int e = norm_ex_check(__func__, mode, operation, xd, {"dz", dzd, dz}, of_relu, s, n, r, rn)) return e;
  if (operation == 2 && computes() && *(V*)real(r) != sm)
    return bad(__func__, "the reserve space is of another forward pass", EXECUTION_FAILED);
  return norm_gradients(__func__, mode, alpha, beta, alpha_p, beta_p, xd, x, dyd, dy, dxd, dx, pd, g, dg, db, epsilon,
                        sm, sv, operation, y, dz);
}

static std::string mode_of(D d) { return ",\"mode\":" + std::to_string(d->mode); }
API int cudnnSetActivationDescriptor(D d, int mode, int, double) { d->mode = mode; return 0; }
API int cudnnActivationForward(void*, D a, V alpha, D xd, V x, V beta, D yd, V y) {
  return computed(__func__, {{"x", xd, x}, {"y", yd, y}},
                  [&] { activation(a, alpha, xd, x, beta, yd, y); }, mode_of(a));
}
API int cudnnActivationBackward(void*, D a, V alpha, D yd, V y, D dyd, V dy, D xd, V x, V beta, D dxd, V dx) {
  return computed(__func__, {{"y", yd, y}, {"dy", dyd, dy}, {"x", xd, x}, {"dx", dxd, dx}},
                  [&] { activation_backward(a, alpha, yd, y, dy, x, beta, dx); }, mode_of(a));
}
API int cudnnSetPooling2dDescriptor(D d, int mode, int, int h, int w, int ph, int pw, int sh, int sw) {
  d->mode = mode; d->window = {h, w}; d->pad = {ph, pw}; d->stride = {sh, sw};
  return 0;
}
API int cudnnSetPoolingNdDescriptor(D d, int mode, int, int n, const int* w, const int* p, const int* s) {
  d->mode = mode; d->window.assign(w, w + n); d->pad.assign(p, p + n); d->stride.assign(s, s + n);
  return 0;
}
API int cudnnPoolingForward(void*, D p, V alpha, D xd, V x, V beta, D yd, V y) {
  return computed(__func__, {{"x", xd, x}, {"y", yd, y}}, [&] { pooling(p, alpha, xd, x, beta, yd, y); }, mode_of(p));
}
API int cudnnPoolingBackward(void*, D p, V alpha, D yd, V y, D dyd, V dy, D xd, V x, V beta, D dxd, V dx) {
  return computed(__func__, {{"y", yd, y}, {"dy", dyd, dy}, {"x", xd, x}, {"dx", dxd, dx}},
                  [&] { pooling_backward(p, alpha, yd, y, dy, xd, x, beta, dx); }, mode_of(p));
}
API int cudnnSoftmaxForward(void*, int algorithm, int mode, V alpha, D xd, V x, V beta, D yd, V y) {
  return computed(__func__, {{"x", xd, x}, {"y", yd, y}}, [&] { softmax(algorithm, mode, alpha, xd, x, beta, y); });
}
API int cudnnSoftmaxBackward(void*, int algorithm, int mode, V alpha, D yd, V y, D dyd, V dy, V beta, D dxd, V dx) {
  return computed(__func__, {{"y", yd, y}, {"dy", dyd, dy}, {"dx", dxd, dx}},
                  [&] { softmax_backward(algorithm, mode, alpha, yd, y, dy, beta, dx); });
}

API int cudnnDropoutGetStatesSize(void*, size_t* n) { *n = 1 << 20; return 0; }
static size_t reserve_of(D d) { return (d->bytes() / width(d->type) + 7) / 8; }  // a bit for each number
API int cudnnDropoutGetReserveSpaceSize(D d, size_t* n) { *n = reserve_of(d); return 0; }
static bool reserve_fits(const char* call, D d, V r, size_t n) {
  if (n < reserve_of(d)) { bad(call, "reserve space is too small"); return false; }
  return check(call, "reserve", r, n);
}
API int cudnnRestoreDropoutDescriptor(D d, void*, float p, V states, size_t n, unsigned long long) {
  d->dropout = p;
  return states && !check("cudnnSetDropoutDescriptor", "states", states, n) ? EXECUTION_FAILED : 0;
}
API int cudnnSetDropoutDescriptor(D d, void* handle, float p, V states, size_t n, unsigned long long seed) {
  say(__func__, "\"p\":%g,\"states\":%zu", p, n);
  return cudnnRestoreDropoutDescriptor(d, handle, p, states, n, seed);
}
static std::string share_of(D d) { return ",\"p\":" + std::to_string(d->dropout); }
API int cudnnDropoutForward(void*, D d, D xd, V x, D yd, V y, V r, size_t n) {
  if (!reserve_fits(__func__, xd, r, n)) return EXECUTION_FAILED;
  return computed(__func__, {{"x", xd, x}, {"y", yd, y}}, [&] { dropout(d, xd, x, y, r); }, share_of(d));
}
API int cudnnDropoutBackward(void*, D d, D yd, V y, D xd, V x, V r, size_t n) {
  if (!reserve_fits(__func__, xd, r, n)) return EXECUTION_FAILED;
  return computed(__func__, {{"dy", yd, y}, {"dx", xd, x}}, [&] { dropout_backward(d, xd, y, x, r); }, share_of(d));
}

API int cudnnSetSpatialTransformerNdDescriptor(D d, int, int type, int n, const int* dims) {
  d->type = type; d->dims.assign(dims, dims + n); d->contiguous();
  return 0;
}
// theta: 2 x 3 numbers for each image; the grid: 2 for each pixel of the output.
static int grid(const char* call, D d, V theta, V grid) {
  size_t images = d->dims[0], pixels = images * d->dims[2] * d->dims[3], w = width(d->type);
  if (!(check(call, "theta", theta, images * 6 * w, w) & check(call, "grid", grid, pixels * 2 * w, w)))
    return EXECUTION_FAILED;
  say(call, "%s", tensor("y", d).c_str());
  return then_compute(call, 0, NOT_SUPPORTED, [] { unknown("spatial transformers"); });
}
API int cudnnSpatialTfGridGeneratorForward(void*, D d, V theta, V g) { return grid(__func__, d, theta, g); }
API int cudnnSpatialTfGridGeneratorBackward(void*, D d, V g, V theta) { return grid(__func__, d, theta, g); }
API int cudnnSpatialTfSamplerForward(void*, D, V, D xd, V x, V, V, D yd, V y) {
  return computed(__func__, {{"x", xd, x}, {"y", yd, y}}, [] { unknown("spatial transformers"); });
}
API int cudnnSpatialTfSamplerBackward(void*, D, V, D xd, V x, V, D dxd, V dx, V, D dyd, V dy, V, V, V) {
  return computed(__func__, {{"x", xd, x}, {"dx", dxd, dx}, {"dy", dyd, dy}}, [] { unknown("spatial transformers"); });
}

// cuDNN: batch norms, activations, poolings, softmax, dropout, samplers.
#include "dnn.h"

API int cudnnDeriveBNTensorDescriptor(D d, D x, int mode) {
  d->type = x->type == 2 ? 0 : x->type;
  d->dims = x->dims;
  for (size_t i = 0; i < d->dims.size(); i++)
    if (i == 0 || (mode && i >= 2)) d->dims[i] = 1;
  d->contiguous();
  return 0;
}
// Float16 data beside float32 statistics, or all of one type.
static int norm_check(const char* call, D x, D y, D p) {
  if (x->type != y->type || (x->type == 2 ? p->type != 0 : p->type != x->type)) return bad(call, "types", NOT_SUPPORTED);
  return 0;
}
API int cudnnBatchNormalizationForwardTraining(void*, int mode, V, V, D xd, V x, D yd, V y, D pd, V g, V b,
                                               double, V rm, V rv, double, V sm, V sv) {
  const char* name = "cudnnBatchNormalizationForwardTraining";
  if (int e = norm_check(name, xd, yd, pd)) return e;
  return call_with(name, {{"x", xd, x}, {"y", yd, y}, {"scale", pd, g}, {"bias", pd, b}, {"running_mean", pd, rm},
                   {"running_var", pd, rv}, {"saved_mean", pd, sm}, {"saved_var", pd, sv}},
            ",\"mode\":" + std::to_string(mode));
}
API int cudnnBatchNormalizationForwardInference(void*, int, V, V, D xd, V x, D yd, V y, D pd, V g, V b, V m, V v,
                                                double) {
  const char* name = "cudnnBatchNormalizationForwardInference";
  if (int e = norm_check(name, xd, yd, pd)) return e;
  return call_with(name, {{"x", xd, x}, {"y", yd, y}, {"scale", pd, g}, {"bias", pd, b}, {"mean", pd, m}, {"var", pd, v}});
}
API int cudnnBatchNormalizationBackward(void*, int mode, V, V, V, V, D xd, V x, D dyd, V dy, D dxd, V dx, D pd, V g,
                                        V dg, V db, double, V sm, V sv) {
  const char* name = "cudnnBatchNormalizationBackward";
  if (int e = norm_check(name, xd, dxd, pd)) return e;
  return call_with(name, {{"x", xd, x}, {"dy", dyd, dy}, {"dx", dxd, dx}, {"scale", pd, g}, {"dscale", pd, dg},
                   {"dbias", pd, db}, {"saved_mean", pd, sm}, {"saved_var", pd, sv}},
            ",\"mode\":" + std::to_string(mode));
}

API int cudnnSetActivationDescriptor(D d, int mode, int, double) { d->mode = mode; return 0; }
API int cudnnActivationForward(void*, D a, V, D xd, V x, V, D yd, V y) {
  return call_with_one_type("cudnnActivationForward", {{"x", xd, x}, {"y", yd, y}}, ",\"mode\":" + std::to_string(a->mode));
}
API int cudnnActivationBackward(void*, D a, V, D yd, V y, D dyd, V dy, D xd, V x, V, D dxd, V dx) {
  return call_with_one_type("cudnnActivationBackward", {{"y", yd, y}, {"dy", dyd, dy}, {"x", xd, x}, {"dx", dxd, dx}},
                   ",\"mode\":" + std::to_string(a->mode));
}
API int cudnnSetPooling2dDescriptor(D d, int mode, int, int, int, int, int, int, int) { d->mode = mode; return 0; }
API int cudnnSetPoolingNdDescriptor(D d, int mode, int, int, const int*, const int*, const int*) {
  d->mode = mode;
  return 0;
}
API int cudnnPoolingForward(void*, D p, V, D xd, V x, V, D yd, V y) {
  return call_with_one_type("cudnnPoolingForward", {{"x", xd, x}, {"y", yd, y}}, ",\"mode\":" + std::to_string(p->mode));
}
API int cudnnPoolingBackward(void*, D p, V, D yd, V y, D dyd, V dy, D xd, V x, V, D dxd, V dx) {
  return call_with_one_type("cudnnPoolingBackward", {{"y", yd, y}, {"dy", dyd, dy}, {"x", xd, x}, {"dx", dxd, dx}},
                   ",\"mode\":" + std::to_string(p->mode));
}
API int cudnnSoftmaxForward(void*, int, int, V, D xd, V x, V, D yd, V y) {
  return call_with_one_type("cudnnSoftmaxForward", {{"x", xd, x}, {"y", yd, y}});
}
API int cudnnSoftmaxBackward(void*, int, int, V, D yd, V y, D dyd, V dy, V, D dxd, V dx) {
  return call_with_one_type("cudnnSoftmaxBackward", {{"y", yd, y}, {"dy", dyd, dy}, {"dx", dxd, dx}});
}

API int cudnnDropoutGetStatesSize(void*, size_t* n) { *n = 1 << 20; return 0; }
static size_t reserve_of(D d) { return (d->bytes() / width(d->type) + 7) / 8; }  // a bit for each number
API int cudnnDropoutGetReserveSpaceSize(D d, size_t* n) { *n = reserve_of(d); return 0; }
static bool reserve_fits(const char* call, D d, V r, size_t n) {
  if (n < reserve_of(d)) { bad(call, "reserve space is too small"); return false; }
  return check(call, "reserve", r, n);
}
API int cudnnSetDropoutDescriptor(D d, void*, float p, V states, size_t n, unsigned long long) {
  d->dropout = p;
  if (states && !check("cudnnSetDropoutDescriptor", "states", states, n)) return EXECUTION_FAILED;
  say("cudnnSetDropoutDescriptor", "\"p\":%g,\"states\":%zu", p, n);
  return 0;
}
API int cudnnRestoreDropoutDescriptor(D d, void*, float p, V states, size_t n, unsigned long long) {
  d->dropout = p;
  if (states && !check("cudnnRestoreDropoutDescriptor", "states", states, n)) return EXECUTION_FAILED;
  return 0;
}
API int cudnnDropoutForward(void*, D d, D xd, V x, D yd, V y, V r, size_t n) {
  if (!reserve_fits("cudnnDropoutForward", xd, r, n)) return EXECUTION_FAILED;
  return call_with_one_type("cudnnDropoutForward", {{"x", xd, x}, {"y", yd, y}}, ",\"p\":" + std::to_string(d->dropout));
}
API int cudnnDropoutBackward(void*, D d, D yd, V y, D xd, V x, V r, size_t n) {
  if (!reserve_fits("cudnnDropoutBackward", xd, r, n)) return EXECUTION_FAILED;
  return call_with_one_type("cudnnDropoutBackward", {{"dy", yd, y}, {"dx", xd, x}}, ",\"p\":" + std::to_string(d->dropout));
}


API int cudnnSetSpatialTransformerNdDescriptor(D d, int, int type, int n, const int* dims) {
  d->type = type; d->dims.assign(dims, dims + n); d->contiguous();
  return 0;
}
// theta: 2 x 3 numbers for each image; the grid: 2 for each pixel of the output.
static int grid(const char* call, D d, V theta, V grid) {
  size_t images = d->dims[0], pixels = images * d->dims[2] * d->dims[3], w = width(d->type);
  if (!(check(call, "theta", theta, images * 6 * w, w) & check(call, "grid", grid, pixels * 2 * w, w))) return EXECUTION_FAILED;
  say(call, "%s", tensor("y", d).c_str());
  return 0;
}
API int cudnnSpatialTfGridGeneratorForward(void*, D d, V theta, V g) { return grid("cudnnSpatialTfGridGeneratorForward", d, theta, g); }
API int cudnnSpatialTfGridGeneratorBackward(void*, D d, V g, V theta) { return grid("cudnnSpatialTfGridGeneratorBackward", d, theta, g); }
API int cudnnSpatialTfSamplerForward(void*, D, V, D xd, V x, V, V, D yd, V y) {
  return call_with_one_type("cudnnSpatialTfSamplerForward", {{"x", xd, x}, {"y", yd, y}});
}
API int cudnnSpatialTfSamplerBackward(void*, D, V, D xd, V x, V, D dxd, V dx, V, D dyd, V dy, V, V, V) {
  return call_with_one_type("cudnnSpatialTfSamplerBackward", {{"x", xd, x}, {"dx", dxd, dx}, {"dy", dyd, dy}});
}

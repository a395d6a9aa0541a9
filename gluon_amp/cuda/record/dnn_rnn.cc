// cuDNN: recurrent layers.
#include "../compute/libraries.h"

static const size_t kSpace = 1 << 20;  // bytes of workspaces and reserve spaces

API int cudnnSetRNNDescriptor_v6(void*, D d, int hidden, int layers, D dropout, int input, int direction, int mode, int al,
                                 int compute) {
  d->hidden = hidden; d->layers = layers; d->input = input; d->direction = direction; d->mode = mode;
  d->algorithm = al; d->compute = compute; d->dropout = dropout ? dropout->dropout : 0;
  say("cudnnSetRNNDescriptor_v6", "\"hidden\":%d", hidden);
  return 0;
}
API int cudnnSetRNNMatrixMathType(D d, int m) {
  d->math = m;
  say("cudnnSetRNNMatrixMathType", "\"math\":\"%s\"", math_name(m));
  return 0;
}
API int cudnnSetRNNProjectionLayers(void*, D d, int projection, int) { d->projection = projection; return 0; }
API int cudnnSetRNNPaddingMode(D, int) { return 0; }
API int cudnnRNNSetClip(void*, D, int, int, double, double) { return 0; }
API int cudnnSetRNNDataDescriptor(D d, int t, int layout, int steps, int batch, int size, const int* lengths, void*) {
  d->type = t; d->format = layout; d->dims = {steps, batch, size}; d->contiguous();
  d->window.assign(lengths, lengths + batch);
  return 0;
}
static void check_lengths(D x) {
  for (int length : x->window)
    if (length != x->dims[0]) unknown("sequences of several lengths");
}
API int cudnnGetRNNParamsSize(void*, D r, D x, size_t* n, int t) {
  size_t gates = r->mode < 2 ? 1 : r->mode == 2 ? 4 : 3, ways = r->direction ? 2 : 1, h = r->hidden;
  size_t out = r->projection ? r->projection : h, all = 0;
  for (int layer = 0; layer < r->layers; layer++) {
    size_t in = layer ? out * ways : x->dims[1];
    all += ways * (gates * h * (in + out + 2) + (r->projection ? h * out : 0));
  }
  *n = all * width(t);
  return 0;
}
API int cudnnGetRNNWorkspaceSize(void*, D, int, D*, size_t* n) { *n = kSpace; return 0; }
API int cudnnGetRNNTrainingReserveSize(void*, D, int, D*, size_t* n) { *n = kSpace; return 0; }
static int rnn(const char* call, D r, std::initializer_list<T> tensors) {
  static const char* modes[] = {"relu", "tanh", "lstm", "gru"};
  bool all = true;
  std::string text;
  for (const T& t : tensors) {
    if (t.desc && t.desc->type != tensors.begin()->desc->type) return bad(call, std::string("type of ") + t.name, BAD_PARAM);
    if (!t.data) continue;  // states are optional
    all &= fits(call, t);
    (text += text.empty() ? "" : ",") += tensor(t.name, t.desc);
  }
  if (!all) return EXECUTION_FAILED;
  say(call, "%s,\"mode\":\"%s\",\"hidden\":%d,\"layers\":%d,\"ways\":%d,\"compute\":\"%s\",\"math\":\"%s\","
      "\"algorithm\":%d", text.c_str(), modes[r->mode & 3], r->hidden, r->layers, r->direction ? 2 : 1,
      type_name(r->compute), math_name(r->math), r->algorithm);
  return 0;
}
static bool space_fits(const char* call, const char* what, V p, size_t n) {
  if (n < kSpace) { bad(call, std::string(what) + " is too small"); return false; }
  return check(call, what, p, n);
}
API int cudnnRNNForwardTrainingEx(void*, D r, D xd, V x, D hd, V h, D cd, V c, D wd, V w, D yd, V y, D hyd, V hy,
                                  D cyd, V cy, D, V, D, V, D, V, D, V, V s, size_t n, V rs, size_t rn) {
  if (!space_fits("cudnnRNNForwardTrainingEx", "workspace", s, n)) return EXECUTION_FAILED;
  if (!space_fits("cudnnRNNForwardTrainingEx", "reserve", rs, rn)) return EXECUTION_FAILED;
  return then_compute("cudnnRNNForwardTrainingEx",
                      rnn("cudnnRNNForwardTrainingEx", r, {{"x", xd, x}, {"h", hd, h}, {"c", cd, c}, {"w", wd, w},
                                                           {"y", yd, y}, {"hy", hyd, hy}, {"cy", cyd, cy}}),
                      EXECUTION_FAILED, [&] { check_lengths(xd); rnn_forward(r, xd, x, h, c, w, y, hy, cy, rs); });
}
API int cudnnRNNForwardInferenceEx(void*, D r, D xd, V x, D hd, V h, D cd, V c, D wd, V w, D yd, V y, D hyd, V hy,
                                   D cyd, V cy, D, V, D, V, D, V, D, V, V s, size_t n) {
  if (!space_fits("cudnnRNNForwardInferenceEx", "workspace", s, n)) return EXECUTION_FAILED;
  return then_compute("cudnnRNNForwardInferenceEx",
                      rnn("cudnnRNNForwardInferenceEx", r, {{"x", xd, x}, {"h", hd, h}, {"c", cd, c}, {"w", wd, w},
                                                            {"y", yd, y}, {"hy", hyd, hy}, {"cy", cyd, cy}}),
                      EXECUTION_FAILED, [&] { check_lengths(xd); rnn_forward(r, xd, x, h, c, w, y, hy, cy, nullptr); });
}
API int cudnnRNNBackwardDataEx(void*, D r, D yd, V y, D dyd, V dy, D, V, D dhyd, V dhy, D dcyd, V dcy, D wd, V w,
                               D hd, V h, D cd, V c, D dxd, V dx, D dhd, V dh, D dcd, V dc, D, V, V s, size_t n,
                               V rs, size_t rn) {
  if (!space_fits("cudnnRNNBackwardDataEx", "workspace", s, n)) return EXECUTION_FAILED;
  if (!space_fits("cudnnRNNBackwardDataEx", "reserve", rs, rn)) return EXECUTION_FAILED;
  return then_compute("cudnnRNNBackwardDataEx",
                      rnn("cudnnRNNBackwardDataEx", r, {{"y", yd, y}, {"dy", dyd, dy}, {"dhy", dhyd, dhy},
                                                        {"dcy", dcyd, dcy}, {"w", wd, w}, {"h", hd, h}, {"c", cd, c},
                                                        {"dx", dxd, dx}, {"dh", dhd, dh}, {"dc", dcd, dc}}),
                      EXECUTION_FAILED, [&] { rnn_data(r, yd, dy, dhy, dcy, w, dx, dh, dc, rs); });
}
API int cudnnRNNBackwardWeightsEx(void*, D r, D xd, V x, D hd, V h, D yd, V y, V s, size_t n, D wd, V w, V rs,
                                  size_t rn) {
  if (!space_fits("cudnnRNNBackwardWeightsEx", "workspace", s, n)) return EXECUTION_FAILED;
  if (!space_fits("cudnnRNNBackwardWeightsEx", "reserve", rs, rn)) return EXECUTION_FAILED;
  return then_compute("cudnnRNNBackwardWeightsEx",
                      rnn("cudnnRNNBackwardWeightsEx", r, {{"x", xd, x}, {"h", hd, h}, {"y", yd, y}, {"dw", wd, w}}),
                      EXECUTION_FAILED, [&] { rnn_weights(xd, w, rs); });
}

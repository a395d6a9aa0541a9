// cuDNN: recurrent layers. cuDNN 8 has both interfaces, cuDNN 9 the second.
#include "../compute/libraries.h"

static const size_t kSpace = 1 << 20;  // bytes of workspaces and reserve spaces
enum { kUnpacked, kPacked };           // layouts of sequences

API int cudnnSetRNNDataDescriptor(D d, int t, int layout, int steps, int batch, int size, const int* lengths, void*) {
  const char* call = "cudnnSetRNNDataDescriptor";
  for (int i = 0; i < batch; i++)
    if (lengths[i] < 0 || lengths[i] > steps || (i && layout == kPacked && lengths[i] > lengths[i - 1]))
      return bad(call, "length " + std::to_string(lengths[i]), BAD_PARAM);
  d->type = t; d->format = layout; d->dims = {steps, batch, size}; d->contiguous();
  d->window.assign(lengths, lengths + batch);
  return 0;
}

// ---- what both interfaces do

// The arguments of a call. Of its tensors, those without data are left out.
struct Rnn {
  const char* call;
  D desc;
  V space;
  size_t space_bytes;
  V reserve;
  size_t reserve_bytes;

  bool fits(const char* what, V p, size_t bytes) const {
    if (bytes < kSpace) return bad(call, std::string(what) + " is too small"), false;
    return check(call, what, p, bytes);
  }
  // Checks and records the call; `sequences` are the first `count` tensors.
  int checked(std::initializer_list<T> tensors, size_t sequences, bool training) const {
    static const char* modes[] = {"relu", "tanh", "lstm", "gru"};
    bool all = true;
    std::string text;
    for (const T& t : tensors) {
      if (t.desc && t.desc->type != tensors.begin()->desc->type) return bad(call, std::string("type of ") + t.name, BAD_PARAM);
      if (size_t(&t - tensors.begin()) < sequences && t.desc->format == kUnpacked && !desc->padded)
        return bad(call, std::string(t.name) + " is padded, and the descriptor does not permit it", BAD_PARAM);
      if (!t.data) continue;  // states are optional
      all &= ::fits(call, t);
      (text += text.empty() ? "" : ",") += tensor(t.name, t.desc);
    }
    if (!all || !fits("workspace", space, space_bytes) || (training && !fits("reserve", reserve, reserve_bytes)))
      return EXECUTION_FAILED;
    say(call, "%s,\"mode\":\"%s\",\"hidden\":%d,\"layers\":%d,\"ways\":%d,\"compute\":\"%s\",\"math\":\"%s\","
        "\"algorithm\":%d", text.c_str(), modes[desc->mode & 3], desc->hidden, desc->layers, desc->direction ? 2 : 1,
        type_name(desc->compute), math_name(desc->math), desc->algorithm);
    return 0;
  }
};

static int forward(const Rnn& rnn, bool training, const T& x, const T& y, const T& h, const T& c, const T& w, const T& hy,
                   const T& cy) {
  return then_compute(rnn.call, rnn.checked({x, y, h, c, w, hy, cy}, 2, training), EXECUTION_FAILED, [&] {
    rnn_forward(rnn.desc, x.desc, x.data, h.data, c.data, w.data, y.data, hy.data, cy.data,
                training ? rnn.reserve : nullptr);
  });
}
static int backward_data(const Rnn& rnn, const T& y, const T& dy, const T& dx, const T& dhy, const T& dcy, const T& w,
                         const T& h, const T& c, const T& dh, const T& dc) {
  return then_compute(rnn.call, rnn.checked({y, dy, dx, dhy, dcy, w, h, c, dh, dc}, 3, true), EXECUTION_FAILED, [&] {
    rnn_data(rnn.desc, y.desc, dy.data, dhy.data, dcy.data, w.data, dx.data, dh.data, dc.data, rnn.reserve);
  });
}
static int backward_weights(const Rnn& rnn, const T& x, const T& y, const T& h, const T& dw) {
  return then_compute(rnn.call, rnn.checked({x, y, h, dw}, 2, true), EXECUTION_FAILED,
                      [&] { rnn_weights(x.desc, dw.data, rnn.reserve); });
}

// ---- cuDNN 8

API int cudnnSetRNNDescriptor_v6(void*, D d, int hidden, int layers, D dropout, int input_mode, int direction, int mode,
                                 int al, int compute) {
  d->hidden = d->projection = hidden; d->layers = layers; d->input_mode = input_mode; d->direction = direction;
  d->mode = mode; d->algorithm = al; d->compute = compute; d->dropout = dropout ? dropout->dropout : 0;
  say("cudnnSetRNNDescriptor_v6", "\"hidden\":%d", hidden);
  return 0;
}
API int cudnnSetRNNMatrixMathType(D d, int m) {
  d->math = m;
  say("cudnnSetRNNMatrixMathType", "\"math\":\"%s\"", math_name(m));
  return 0;
}
API int cudnnSetRNNProjectionLayers(void*, D d, int projection, int) { d->projection = projection; return 0; }
API int cudnnSetRNNPaddingMode(D d, int padded) { d->padded = padded; return 0; }
API int cudnnRNNSetClip(void*, D d, int mode, int nan, double low, double high) {
  d->clip = {mode == 1, nan == 1, low, high};
  return 0;
}
API int cudnnGetRNNParamsSize(void*, D r, D x, size_t* n, int t) {
  *n = rnn_parameters(r, x->dims[1]) * width(t);
  return 0;
}
API int cudnnGetRNNWorkspaceSize(void*, D, int, D*, size_t* n) { *n = kSpace; return 0; }
API int cudnnGetRNNTrainingReserveSize(void*, D, int, D*, size_t* n) { *n = kSpace; return 0; }

API int cudnnRNNForwardTrainingEx(void*, D r, D xd, V x, D hd, V h, D cd, V c, D wd, V w, D yd, V y, D hyd, V hy,
                                  D cyd, V cy, D, V, D, V, D, V, D, V, V s, size_t n, V rs, size_t rn) {
  return forward({"cudnnRNNForwardTrainingEx", r, s, n, rs, rn}, true, {"x", xd, x}, {"y", yd, y}, {"h", hd, h},
                 {"c", cd, c}, {"w", wd, w}, {"hy", hyd, hy}, {"cy", cyd, cy});
}
API int cudnnRNNForwardInferenceEx(void*, D r, D xd, V x, D hd, V h, D cd, V c, D wd, V w, D yd, V y, D hyd, V hy,
                                   D cyd, V cy, D, V, D, V, D, V, D, V, V s, size_t n) {
  return forward({"cudnnRNNForwardInferenceEx", r, s, n, nullptr, 0}, false, {"x", xd, x}, {"y", yd, y}, {"h", hd, h},
                 {"c", cd, c}, {"w", wd, w}, {"hy", hyd, hy}, {"cy", cyd, cy});
}
API int cudnnRNNBackwardDataEx(void*, D r, D yd, V y, D dyd, V dy, D, V, D dhyd, V dhy, D dcyd, V dcy, D wd, V w,
                               D hd, V h, D cd, V c, D dxd, V dx, D dhd, V dh, D dcd, V dc, D, V, V s, size_t n,
                               V rs, size_t rn) {
  return backward_data({"cudnnRNNBackwardDataEx", r, s, n, rs, rn}, {"y", yd, y}, {"dy", dyd, dy}, {"dx", dxd, dx},
                       {"dhy", dhyd, dhy}, {"dcy", dcyd, dcy}, {"w", wd, w}, {"h", hd, h}, {"c", cd, c}, {"dh", dhd, dh},
                       {"dc", dcd, dc});
}
API int cudnnRNNBackwardWeightsEx(void*, D r, D xd, V x, D hd, V h, D yd, V y, V s, size_t n, D wd, V w, V rs,
                                  size_t rn) {
  return backward_weights({"cudnnRNNBackwardWeightsEx", r, s, n, rs, rn}, {"x", xd, x}, {"y", yd, y}, {"h", hd, h},
                          {"dw", wd, w});
}

// ---- cuDNN 9

static size_t weight_bytes(D r) { return rnn_parameters(r, r->input) * width(r->type); }

API int cudnnSetRNNDescriptor_v8(D r, int algorithm, int mode, int bias, int direction, int input_mode, int type,
                                 int compute, int math, int input, int hidden, int projection, int layers, D dropout,
                                 unsigned flags) {
  const char* call = "cudnnSetRNNDescriptor_v8";
  if (bias != 2) return bad(call, "bias mode", NOT_SUPPORTED);  // MXNet has two biases
  if (compute != type && !(type == 2 && compute == 0)) return bad(call, "types", NOT_SUPPORTED);
  if (projection > hidden || (projection != hidden && mode != 2)) return bad(call, "projection", NOT_SUPPORTED);
  r->algorithm = algorithm; r->mode = mode; r->direction = direction; r->input_mode = input_mode; r->type = type;
  r->compute = compute; r->math = math; r->input = input; r->hidden = hidden; r->projection = projection;
  r->layers = layers; r->drops = dropout; r->dropout = dropout ? dropout->dropout : 0; r->padded = flags & 1;
  r->clip = {};
  say(call, "\"hidden\":%d", hidden);
  return 0;
}
API int cudnnGetRNNDescriptor_v8(D r, int* algorithm, int* mode, int* bias, int* direction, int* input_mode, int* type,
                                 int* compute, int* math, int* input, int* hidden, int* projection, int* layers,
                                 D* dropout, unsigned* flags) {
  if (r->type < 0) return bad("cudnnGetRNNDescriptor_v8", "a descriptor that was not set", BAD_PARAM);
  *algorithm = r->algorithm; *mode = r->mode; *bias = 2; *direction = r->direction; *input_mode = r->input_mode;
  *type = r->type; *compute = r->compute; *math = r->math; *input = r->input; *hidden = r->hidden;
  *projection = r->projection; *layers = r->layers; *dropout = r->drops; *flags = r->padded;
  return 0;
}
API int cudnnGetRNNTempSpaceSizes(void*, D r, int training, D x, size_t* work, size_t* reserve) {
  if (x->type != r->type || x->dims[2] != r->input) return bad("cudnnGetRNNTempSpaceSizes", "type or width of x", BAD_PARAM);
  *work = kSpace;
  *reserve = training ? kSpace : 0;
  return 0;
}
API int cudnnGetRNNWeightSpaceSize(void*, D r, size_t* n) { *n = weight_bytes(r); return 0; }
API int cudnnGetRNNWeightParams(void*, D r, int layer, size_t n, V weights, int gate, D matrix, V* matrix_at, D bias,
                                V* bias_at) {
  if (n < weight_bytes(r)) return bad("cudnnGetRNNWeightParams", "size of the weights", BAD_PARAM);
  const RnnPart part = rnn_part(r, layer, gate);
  const auto describe = [&](D d, V* at, ll place, ll rows, ll columns) {
    *at = place < 0 ? nullptr : (const char*)weights + place * width(r->type);
    d->type = r->type;
    d->dims = place < 0 ? std::vector<int>() : std::vector<int>{1, (int)rows, (int)columns};
    d->contiguous();
  };
  describe(matrix, matrix_at, part.matrix, part.rows, part.columns);
  describe(bias, bias_at, part.bias, part.rows, 1);
  return 0;
}

// Checks the arguments that only this interface has, and describes the weights.
static int described(const char* call, D r, V lengths, D xd, D hd, D cd, size_t bytes, D weights) {
  const int places = r->layers * (r->direction ? 2 : 1), batch = xd->dims[1];
  if (lengths) return bad(call, "lengths in device memory: unnecessary from cuDNN 8.9.1 on");
  if (xd->type != r->type || xd->dims[2] != r->input) return bad(call, "type or width of x", BAD_PARAM);
  if (hd && hd->dims != std::vector<int>{places, batch, r->projection}) return bad(call, "shape of h", BAD_PARAM);
  if (cd && (r->mode != 2 || cd->dims != std::vector<int>{places, batch, r->hidden})) return bad(call, "shape of c", BAD_PARAM);
  if (bytes < weight_bytes(r)) return bad(call, "size of the weights", BAD_PARAM);
  weights->type = r->type;
  weights->dims = {(int)rnn_parameters(r, r->input)};
  weights->contiguous();
  return 0;
}

API int cudnnRNNForward(void*, D r, int training, V lengths, D xd, V x, D yd, V y, D hd, V h, V hy, D cd, V c, V cy,
                        size_t wn, V w, size_t n, V s, size_t rn, V rs) {
  Desc weights;
  if (int status = described("cudnnRNNForward", r, lengths, xd, hd, cd, wn, &weights)) return status;
  return forward({"cudnnRNNForward", r, s, n, rs, rn}, training, {"x", xd, x}, {"y", yd, y}, {"h", hd, h}, {"c", cd, c},
                 {"w", &weights, w}, {"hy", hd, hy}, {"cy", cd, cy});
}
API int cudnnRNNBackwardData_v8(void*, D r, V lengths, D yd, V y, V dy, D xd, V dx, D hd, V h, V dhy, V dh, D cd, V c,
                                V dcy, V dc, size_t wn, V w, size_t n, V s, size_t rn, V rs) {
  Desc weights;
  if (int status = described("cudnnRNNBackwardData_v8", r, lengths, xd, hd, cd, wn, &weights)) return status;
  return backward_data({"cudnnRNNBackwardData_v8", r, s, n, rs, rn}, {"y", yd, y}, {"dy", yd, dy}, {"dx", xd, dx},
                       {"dhy", hd, dhy}, {"dcy", cd, dcy}, {"w", &weights, w}, {"h", hd, h}, {"c", cd, c}, {"dh", hd, dh},
                       {"dc", cd, dc});
}
API int cudnnRNNBackwardWeights_v8(void*, D r, int set, V lengths, D xd, V x, D hd, V h, D yd, V y, size_t wn, V dw,
                                   size_t n, V s, size_t rn, V rs) {
  Desc weights;
  if (set) return bad("cudnnRNNBackwardWeights_v8", "gradients must be added", NOT_SUPPORTED);
  if (int status = described("cudnnRNNBackwardWeights_v8", r, lengths, xd, hd, nullptr, wn, &weights)) return status;
  return backward_weights({"cudnnRNNBackwardWeights_v8", r, s, n, rs, rn}, {"x", xd, x}, {"y", yd, y}, {"h", hd, h},
                          {"dw", &weights, dw});
}

// cuDNN: handles and descriptors of tensors and filters.
#include "dnn.h"

size_t Desc::bytes() const {
  size_t last = 1;
  for (size_t i = 0; i < dims.size(); i++) last += (size_t)(dims[i] - 1) * strides[i];
  return last * width(type);
}
void Desc::contiguous() {
  strides.assign(dims.size(), 1);
  for (int i = (int)dims.size() - 2; i >= 0; i--) strides[i] = strides[i + 1] * dims[i + 1];
}

std::string list(const std::vector<int>& v) {
  std::string out = "[";
  for (size_t i = 0; i < v.size(); i++) out += (i ? "," : "") + std::to_string(v[i]);
  return out + "]";
}
std::string tensor(const char* name, const Desc* d) {
  return std::string("\"") + name + "\":{\"type\":\"" + type_name(d->type) + "\",\"dims\":" + list(d->dims) + "}";
}
const char* math_name(int m) {
  static const char* names[] = {"DEFAULT", "TENSOR_OP", "TENSOR_OP_ALLOW_CONVERSION", "FMA"};
  return m >= 0 && m < 4 ? names[m] : "?";
}

bool fits(const char* call, const T& t) { return check(call, t.name, t.data, t.desc->bytes(), width(t.desc->type)); }

int call_with(const char* call, std::initializer_list<T> tensors, const std::string& more) {
  std::string text;
  bool all = true;
  for (const T& t : tensors) {
    if (!t.desc) continue;
    all &= fits(call, t);
    (text += text.empty() ? "" : ",") += tensor(t.name, t.desc);
  }
  if (!all) return EXECUTION_FAILED;
  say(call, "%s%s", text.c_str(), more.c_str());
  return 0;
}
int call_with_one_type(const char* call, std::initializer_list<T> tensors, const std::string& more) {
  for (const T& t : tensors)
    if (t.desc && t.desc->type != tensors.begin()->desc->type)
      return bad(call, std::string("type of ") + t.name + ": " + type_name(t.desc->type) + " beside " +
                 type_name(tensors.begin()->desc->type), BAD_PARAM);
  return call_with(call, tensors, more);
}

API size_t cudnnGetVersion() { return number("RECORDING_GPU_CUDNN", 8906); }
API const char* cudnnGetErrorString(int e) {
  return e == NOT_SUPPORTED ? "CUDNN_STATUS_NOT_SUPPORTED" : e == BAD_PARAM ? "CUDNN_STATUS_BAD_PARAM"
      : e ? "CUDNN_STATUS_EXECUTION_FAILED" : "CUDNN_STATUS_SUCCESS";
}
API int cudnnCreate(void** h) { *h = made_handle(); return 0; }
API int cudnnDestroy(void*) { return 0; }
API int cudnnSetStream(void** h, void* s) { *h = s; return live("cudnnSetStream", s) ? 0 : BAD_PARAM; }
API int cudnnGetStream(void** h, void** s) { *s = *h; return 0; }

#define DESCRIPTOR(kind)                                                          \
  API int cudnnCreate##kind##Descriptor(D* d) { *d = new Desc(); return 0; }      \
  API int cudnnDestroy##kind##Descriptor(D d) { delete d; return 0; }
DESCRIPTOR(Tensor) DESCRIPTOR(Filter) DESCRIPTOR(Convolution) DESCRIPTOR(Pooling) DESCRIPTOR(Activation)
DESCRIPTOR(Dropout) DESCRIPTOR(RNN) DESCRIPTOR(RNNData) DESCRIPTOR(SpatialTransformer)

API int cudnnSetTensor4dDescriptor(D d, int format, int t, int n, int c, int h, int w) {
  d->type = t; d->format = format; d->dims = {n, c, h, w};
  d->contiguous();
  if (format == 1) d->strides = {h * w * c, 1, w * c, c};
  return 0;
}
API int cudnnSetTensorNdDescriptor(D d, int t, int n, const int* dims, const int* strides) {
  if (n < 3 || n > 8) return bad("cudnnSetTensorNdDescriptor", "dimensions: " + std::to_string(n), BAD_PARAM);
  d->type = t; d->dims.assign(dims, dims + n); d->strides.assign(strides, strides + n);
  return 0;
}
API int cudnnSetFilter4dDescriptor(D d, int t, int format, int k, int c, int h, int w) {
  d->type = t; d->format = format; d->dims = {k, c, h, w}; d->contiguous();
  return 0;
}
API int cudnnSetFilterNdDescriptor(D d, int t, int format, int n, const int* dims) {
  d->type = t; d->format = format; d->dims.assign(dims, dims + n); d->contiguous();
  return 0;
}
API int cudnnGetTensorNdDescriptor(D d, int wanted, int* t, int* n, int* dims, int* strides) {
  *t = d->type;
  *n = (int)d->dims.size();
  for (int i = 0; i < wanted && i < *n; i++) dims[i] = d->dims[i], strides[i] = d->strides[i];
  return 0;
}

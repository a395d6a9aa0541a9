// Batch norms with a ReLU, and with an addition before it, for channels-last float16 images on GPUs: operators that
// MXNet does not have (graph/norms.py).
//
// `_gluon_amp_norm_relu`: y = relu(norm(x) + z). Inputs: x, gamma, beta, moving mean, moving variance, and z if `added`
// is "last"; z is the first input if it is "first", and 0 without the attribute. Outputs: y, mean, 1 / deviation, and
// what cuDNN's fused functions keep for the backward pass. If these do not support an image, separate functions run.
//
// `_gluon_amp_backward_norm_relu`: gradient, x, y, gamma, beta, mean, 1 / deviation, kept -> gradients of x, gamma, beta
// and, if `added` is set, of z.
#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <memory>

#include "dispatch/attributes.h"
#include "gpu.h"

#include <mxnet/resource.h>

typedef void *CudnnHandle, *Tensor, *Activation;
typedef const void* In;
typedef void* Out;

// From the libraries that libmxnet.so loads; null in a build for CPUs. cuDNN's functions return its status.
extern "C" {
#define CUDNN(name) __attribute__((weak)) int cudnn##name
CUDNN(GetStream)(CudnnHandle, void** stream);
CUDNN(CreateTensorDescriptor)(Tensor*);
CUDNN(SetTensor4dDescriptor)(Tensor, int format, int type, int n, int c, int h, int w);
CUDNN(DeriveBNTensorDescriptor)(Tensor parameters, Tensor data, int mode);
CUDNN(CreateActivationDescriptor)(Activation*);
CUDNN(SetActivationDescriptor)(Activation, int mode, int nan, double limit);
CUDNN(AddTensor)(CudnnHandle, In alpha, Tensor ad, In a, In beta, Tensor cd, Out c);
CUDNN(ActivationForward)(CudnnHandle, Activation, In alpha, Tensor xd, In x, In beta, Tensor yd, Out y);
CUDNN(ActivationBackward)(CudnnHandle, Activation, In alpha, Tensor yd, In y, Tensor dyd, In dy, Tensor xd, In x,
                          In beta, Tensor dxd, Out dx);
CUDNN(BatchNormalizationForwardInference)(CudnnHandle, int mode, In alpha, In beta, Tensor xd, In x, Tensor yd, Out y,
                                          Tensor pd, In scale, In bias, In mean, In variance, double epsilon);
CUDNN(BatchNormalizationForwardTraining)(CudnnHandle, int mode, In alpha, In beta, Tensor xd, In x, Tensor yd, Out y,
                                         Tensor pd, In scale, In bias, double factor, Out running_mean, Out running_var,
                                         double epsilon, Out mean, Out inverse);
CUDNN(BatchNormalizationBackward)(CudnnHandle, int mode, In alpha, In beta, In alpha_p, In beta_p, Tensor xd, In x,
                                  Tensor dyd, In dy, Tensor dxd, Out dx, Tensor pd, In scale, Out dscale, Out dbias,
                                  double epsilon, In mean, In inverse);
CUDNN(GetBatchNormalizationTrainingExReserveSpaceSize)(CudnnHandle, int mode, int operation, Activation, Tensor x,
                                                       size_t*);
CUDNN(GetBatchNormalizationForwardTrainingExWorkspaceSize)(CudnnHandle, int mode, int operation, Tensor x, Tensor z,
                                                           Tensor y, Tensor parameters, Activation, size_t*);
CUDNN(GetBatchNormalizationBackwardExWorkspaceSize)(CudnnHandle, int mode, int operation, Tensor x, Tensor y, Tensor dy,
                                                    Tensor dz, Tensor dx, Tensor parameters, Activation, size_t*);
CUDNN(BatchNormalizationForwardTrainingEx)(CudnnHandle, int mode, int operation, In alpha, In beta, Tensor xd, In x,
                                           Tensor zd, In z, Tensor yd, Out y, Tensor pd, In scale, In bias,
                                           double factor, Out running_mean, Out running_var, double epsilon, Out mean,
                                           Out inverse, Activation, Out work, size_t work_bytes, Out reserve,
                                           size_t reserve_bytes);
CUDNN(BatchNormalizationBackwardEx)(CudnnHandle, int mode, int operation, In alpha, In beta, In alpha_p, In beta_p,
                                    Tensor xd, In x, Tensor yd, In y, Tensor dyd, In dy, Tensor dzd, Out dz, Tensor dxd,
                                    Out dx, Tensor pd, In scale, In bias, Out dscale, Out dbias, double epsilon,
                                    In mean, In inverse, Activation, Out work, size_t work_bytes, Out reserve,
                                    size_t reserve_bytes);
#undef CUDNN
__attribute__((weak)) int cudaMemsetAsync(void* at, int value, size_t bytes, void* stream);
}

namespace gluon_amp {
namespace {

using Shapes = mxnet::ShapeVector;
using Types = std::vector<int>;
using Arrays = std::vector<TBlob>;
using Requests = std::vector<OpReqType>;
using Entries = std::vector<nnvm::NodeEntry>;

// cuDNN's numbers.
enum { kBadParam = 3, kNotSupported = 9 };           // statuses
enum { kFloat16Data = 2 };                                 // type
enum { kNchw, kNhwc };                               // formats
enum { kSpatial = 1, kPersistent };                  // modes of batch norms
enum { kWithRelu = 1, kWithAdditionAndRelu };        // operations
enum { kRelu = 1 };                                  // activation
enum { kY, kMean, kInverse, kKept };                 // outputs
const float kOne = 1, kZero = 0;

void check(int status, const char* function) {
  if (status) throw dmlc::Error(std::string("batch norm: ") + function + ": cuDNN status " + std::to_string(status));
}
#define CALL(name, ...) check(cudnn##name(__VA_ARGS__), #name)

// Where z is among the inputs, and the first of the others.
struct Places {
  bool added;
  size_t z, x;
  explicit Places(const NodeAttrs& attrs) {
    const std::string where = word(attrs, "added", "");
    added = !where.empty();
    x = where == "first";
    z = x ? 0 : 5;
  }
  uint32_t inputs() const { return 5 + added; }
};

// At least the bytes of what cuDNN keeps with an addition: a bit for each number, in whole blocks of rows and channels.
int64_t kept_bytes(const mxnet::TShape& x) {
  const int64_t channels = x[x.ndim() - 1], rows = x.Size() / channels;
  return (rows + 31) / 32 * 32 * ((channels + 63) / 64 * 64) / 8 + 4096;
}

// ---- images of one shape

// How cuDNN describes images of rows x channels, and what its fused functions need for them. Descriptors do not change.
struct Images {
  int channels, rows, operation;
  Tensor tensor = nullptr, as_rows = nullptr, parameters = nullptr;
  Activation relu = nullptr;
  size_t kept = 0, forward_bytes = 0, backward_bytes = 0;  // 0 bytes of a workspace: there is no fused function
  // Whether cuDNN refused a forward pass. Backward passes then do not use what it keeps.
  mutable std::atomic<bool> refused{false};

  Images(CudnnHandle handle, int channels, int rows, int operation)
      : channels(channels), rows(rows), operation(operation) {
    CALL(CreateTensorDescriptor, &tensor);
    CALL(SetTensor4dDescriptor, tensor, kNhwc, kFloat16Data, 1, channels, rows, 1);
    CALL(CreateTensorDescriptor, &as_rows);  // as MXNet's BatchNorm describes them
    CALL(SetTensor4dDescriptor, as_rows, kNchw, kFloat16Data, rows, channels, 1, 1);
    CALL(CreateTensorDescriptor, &parameters);
    CALL(DeriveBNTensorDescriptor, parameters, tensor, kSpatial);
    CALL(CreateActivationDescriptor, &relu);
    CALL(SetActivationDescriptor, relu, kRelu, 0, 0);
    // They were measured for multiples of 64 channels only; cuDNN documents multiples of 4.
    if (channels % 4 ||
        cudnnGetBatchNormalizationTrainingExReserveSpaceSize(handle, kPersistent, operation, relu, tensor, &kept))
      return;
    if (cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(handle, kPersistent, operation, tensor, z(), tensor,
                                                                 parameters, relu, &forward_bytes) ||
        cudnnGetBatchNormalizationBackwardExWorkspaceSize(handle, kPersistent, operation, tensor, tensor, tensor, z(),
                                                          tensor, parameters, relu, &backward_bytes) ||
        !forward_bytes || !backward_bytes)
      forward_bytes = backward_bytes = 0;
  }
  Images(const Images&) = delete;

  Tensor z() const { return operation == kWithAdditionAndRelu ? tensor : nullptr; }
  // Whether what the fused functions keep fits in `memory`.
  bool is_fused(const TBlob& memory) const { return !refused && kept <= static_cast<size_t>(size(memory)); }
};

// The images of a device, which are described once and kept.
const Images& described(int device, CudnnHandle handle, int channels, int rows, int operation) {
  static auto& lock = *new std::mutex;
  static auto& cache = *new std::map<std::tuple<int, int, int, int>, std::unique_ptr<Images>>;
  const std::lock_guard<std::mutex> guard(lock);
  auto& entry = cache[{device, channels, rows, operation}];
  if (!entry) entry.reset(new Images(handle, channels, rows, operation));
  return *entry;
}

// ---- one call

struct Norm {
  CudnnHandle handle;
  void* stream;
  double epsilon, factor;
  const Images* images;

  Norm(const NodeAttrs& attrs, const OpContext& context, const TBlob& x)
      : epsilon(number(attrs, "eps", 1e-3f)), factor(1 - number(attrs, "momentum", 0.9f)) {
    const auto* on = static_cast<const GpuStream*>(context.run_ctx.stream);
    handle = on->cudnn;
    if (!cudnnGetStream || cudnnGetStream(handle, &stream) || stream != on->stream)
      throw dmlc::Error("batch norm: MXNet's GPU stream has other members than in MXNet 1.9.1");
    const int64_t channels = x.shape_[x.ndim() - 1], rows = size(x) / channels;
    if (rows > std::numeric_limits<int>::max())
      throw dmlc::Error("batch norm: an image has more rows than cuDNN's 2^31 - 1");
    images = &described(context.run_ctx.ctx.dev_id, handle, static_cast<int>(channels), static_cast<int>(rows),
                        Places(attrs).added ? kWithAdditionAndRelu : kWithRelu);
  }
};

void* scratch(const OpContext& context, size_t bytes) { return context.requested[0].get_space_internal(bytes); }

// ---- forward pass

void forward(const NodeAttrs& attrs, const OpContext& context, const Arrays& in, const Requests& req, const Arrays& out) {
  if (req[kY] == mxnet::kNullOp) return;
  if (req[kY] == mxnet::kAddTo) throw dmlc::Error("batch norm: its output is not added to an array");
  const Places at(attrs);
  const Norm norm(attrs, context, in[at.x]);
  const Images& images = *norm.images;
  const void *x = in[at.x].dptr_, *gamma = in[at.x + 1].dptr_, *beta = in[at.x + 2].dptr_,
             *z = at.added ? in[at.z].dptr_ : nullptr;
  void *mean = in[at.x + 3].dptr_, *variance = in[at.x + 4].dptr_, *y = out[kY].dptr_;
  if (context.is_train) {
    const size_t bytes = images.is_fused(out[kKept]) ? images.forward_bytes : 0;
    if (bytes) {
      const int status = cudnnBatchNormalizationForwardTrainingEx(
          norm.handle, kPersistent, images.operation, &kOne, &kZero, images.tensor, x, images.z(), z, images.tensor, y,
          images.parameters, gamma, beta, norm.factor, mean, variance, norm.epsilon, out[kMean].dptr_,
          out[kInverse].dptr_, images.relu, scratch(context, bytes), bytes, out[kKept].dptr_, images.kept);
      if (status != kNotSupported && status != kBadParam) return check(status, "BatchNormalizationForwardTrainingEx");
      images.refused = true;
    }
    CALL(BatchNormalizationForwardTraining, norm.handle, kPersistent, &kOne, &kZero, images.as_rows, x, images.as_rows,
         y, images.parameters, gamma, beta, norm.factor, mean, variance, norm.epsilon, out[kMean].dptr_,
         out[kInverse].dptr_);
  } else {
    CALL(BatchNormalizationForwardInference, norm.handle, kSpatial, &kOne, &kZero, images.as_rows, x, images.as_rows, y,
         images.parameters, gamma, beta, mean, variance, norm.epsilon);
  }
  if (at.added) CALL(AddTensor, norm.handle, &kOne, images.as_rows, z, &kOne, images.as_rows, y);
  CALL(ActivationForward, norm.handle, images.relu, &kOne, images.as_rows, y, &kZero, images.as_rows, y);
}

// ---- backward pass

enum { kGradient, kX, kOfY, kGamma, kBeta, kMeanOfX, kInverseOfX, kWasKept };  // inputs
enum { kOfX, kOfGamma, kOfBeta, kOfZ };                                        // outputs

// cuDNN adds both gradients of parameters, or none. Returns whether it must add.
bool adds_parameters(const Norm& norm, const Requests& req, const Arrays& out) {
  const bool adds = req[kOfGamma] == mxnet::kAddTo || req[kOfBeta] == mxnet::kAddTo;
  for (int i : {kOfGamma, kOfBeta})
    if (adds && req[i] != mxnet::kAddTo &&
        cudaMemsetAsync(out[i].dptr_, 0, norm.images->channels * sizeof(float), norm.stream))
      throw dmlc::Error("batch norm: cudaMemsetAsync fails");
  return adds;
}

void backward(const NodeAttrs& attrs, const OpContext& context, const Arrays& in, const Requests& req,
              const Arrays& out) {
  const Norm norm(attrs, context, in[kX]);
  const Images& images = *norm.images;
  const bool added = out.size() > kOfZ;
  const float* const beta = req[kOfX] == mxnet::kAddTo ? &kOne : &kZero;
  const float* const beta_p = adds_parameters(norm, req, out) ? &kOne : &kZero;
  const bool writes = req[kOfX] != mxnet::kAddTo && !(added && req[kOfZ] == mxnet::kAddTo);
  const size_t bytes = context.is_train && writes && images.is_fused(in[kWasKept]) ? images.backward_bytes : 0;
  if (bytes) {
    return CALL(BatchNormalizationBackwardEx, norm.handle, kPersistent, images.operation, &kOne, &kZero, &kOne, beta_p,
                images.tensor, in[kX].dptr_, images.tensor, in[kOfY].dptr_, images.tensor, in[kGradient].dptr_,
                images.z(), added ? out[kOfZ].dptr_ : nullptr, images.tensor, out[kOfX].dptr_, images.parameters,
                in[kGamma].dptr_, in[kBeta].dptr_, out[kOfGamma].dptr_, out[kOfBeta].dptr_, norm.epsilon,
                in[kMeanOfX].dptr_, in[kInverseOfX].dptr_, images.relu, scratch(context, bytes), bytes,
                in[kWasKept].dptr_, images.kept);
  }
  void* const gradient = scratch(context, size(in[kX]) * sizeof(Number16));  // of the sum
  CALL(ActivationBackward, norm.handle, images.relu, &kOne, images.as_rows, in[kOfY].dptr_, images.as_rows,
       in[kGradient].dptr_, images.as_rows, in[kOfY].dptr_, &kZero, images.as_rows, gradient);
  if (added && req[kOfZ] != mxnet::kNullOp)
    CALL(AddTensor, norm.handle, &kOne, images.as_rows, gradient, req[kOfZ] == mxnet::kAddTo ? &kOne : &kZero,
         images.as_rows, out[kOfZ].dptr_);
  const bool saved = context.is_train;
  CALL(BatchNormalizationBackward, norm.handle, kPersistent, &kOne, beta, &kOne, beta_p, images.as_rows, in[kX].dptr_,
       images.as_rows, gradient, images.as_rows, out[kOfX].dptr_, images.parameters, in[kGamma].dptr_,
       out[kOfGamma].dptr_, out[kOfBeta].dptr_, norm.epsilon, saved ? in[kMeanOfX].dptr_ : nullptr,
       saved ? in[kInverseOfX].dptr_ : nullptr);
}

// ---- registration

bool shapes(const NodeAttrs& attrs, Shapes* in, Shapes* out) {
  const Places at(attrs);
  const mxnet::TShape x = (*in)[at.x];
  if (!mxnet::shape_is_known(x)) return false;
  const int axis = static_cast<int>(number(attrs, "axis", -1));
  if (axis != -1 && axis != x.ndim() - 1) throw dmlc::Error("batch norm: its axis is not the last");
  const mxnet::TShape parameters(1, x[x.ndim() - 1]);
  for (size_t i = 1; i < 5; ++i) (*in)[at.x + i] = parameters;
  if (at.added) (*in)[at.z] = x;
  *out = {x, parameters, parameters, mxnet::TShape(1, at.added ? kept_bytes(x) : 1)};
  return true;
}

bool types(const NodeAttrs& attrs, Types* in, Types* out) {
  const Places at(attrs);
  std::fill(in->begin(), in->end(), mshadow::kFloat32);
  (*in)[at.x] = mshadow::kFloat16;
  if (at.added) (*in)[at.z] = mshadow::kFloat16;
  *out = {mshadow::kFloat16, mshadow::kFloat32, mshadow::kFloat32, mshadow::kUint8};
  return true;
}

bool backward_shapes(const NodeAttrs&, Shapes* in, Shapes* out) {
  const mxnet::TShape& x = (*in)[kX];
  if (!mxnet::shape_is_known(x)) return false;
  const mxnet::TShape parameters(1, x[x.ndim() - 1]);
  (*in)[kGradient] = x;
  for (size_t i = 0; i < out->size(); ++i) (*out)[i] = i == kOfGamma || i == kOfBeta ? parameters : x;
  return true;
}

bool backward_types(const NodeAttrs&, Types* in, Types* out) {
  (*in)[kGradient] = mshadow::kFloat16;
  for (size_t i = 0; i < out->size(); ++i)
    (*out)[i] = i == kOfGamma || i == kOfBeta ? mshadow::kFloat32 : mshadow::kFloat16;
  return true;
}

nnvm::ObjectPtr node_of(const char* op, const Texts& texts, const std::string& name) {
  nnvm::ObjectPtr node = make_node(nnvm::Op::Get(op), texts);
  node->attrs.name = name;
  return node;
}

Entries gradient(const nnvm::ObjectPtr& n, const Entries& above) {
  const Places at(n->attrs);
  const Texts texts(n->attrs.dict.begin(), n->attrs.dict.end());
  const nnvm::ObjectPtr node = node_of("_gluon_amp_backward_norm_relu", texts, n->attrs.name + "_backward");
  const Entries& of = inputs_of(n.get());
  inputs_of(node.get()) = {above[0], of[at.x], {n, kY, 0}, of[at.x + 1], of[at.x + 2], {n, kMean, 0}, {n, kInverse, 0},
                           {n, kKept, 0}};
  const nnvm::ObjectPtr none = node_of("_NoGradient", {}, "NoGradient");
  Entries gradients{{node, kOfX, 0}, {node, kOfGamma, 0}, {node, kOfBeta, 0}, {none, 0, 0}, {none, 0, 0}};
  if (at.added) gradients.insert(gradients.begin() + at.z, nnvm::NodeEntry(node, kOfZ, 0));
  return gradients;
}

std::vector<mxnet::ResourceRequest> workspace(const NodeAttrs&) { return {mxnet::ResourceRequest::kTempSpace}; }

nnvm::Op& add(const char* name, bool (*shapes)(const NodeAttrs&, Shapes*, Shapes*),
              bool (*types)(const NodeAttrs&, Types*, Types*), const mxnet::FCompute& compute) {
  nnvm::Op& op = add_operator(name, 0, shapes, types, nullptr);
  set<mxnet::FCompute>(op, "FCompute<gpu>", compute);
  set<mxnet::FResourceRequest>(op, "FResourceRequest", workspace);
  return op;
}

}  // namespace

void register_gpu_norms() {
  nnvm::Op& op = add("norm_relu", shapes, types, forward);
  op.get_num_inputs = [](const NodeAttrs& attrs) { return Places(attrs).inputs(); };
  op.num_outputs = 4;
  set<nnvm::FNumVisibleOutputs>(op, "FNumVisibleOutputs", [](const NodeAttrs&) { return 1u; });
  set<nnvm::FMutateInputs>(op, "FMutateInputs", [](const NodeAttrs& attrs) {
    const uint32_t x = static_cast<uint32_t>(Places(attrs).x);
    return std::vector<uint32_t>{x + 3, x + 4};
  });
  set<nnvm::FGradient>(op, "FGradient", gradient);
  nnvm::Op& back = add("backward_norm_relu", backward_shapes, backward_types, backward);
  back.num_inputs = 8;
  back.get_num_outputs = [](const NodeAttrs& attrs) { return 3u + Places(attrs).added; };
}

}  // namespace gluon_amp

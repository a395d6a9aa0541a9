// Batch norms of channels-last data in float16, by cuDNN's fast kernels. MXNet describes data of n rows of c channels
// to cuDNN as n x c x 1 x 1 in NCHW, for which cuDNN's kernels are slow. Here the same memory is described as NHWC,
// and training has the workspace without which cuDNN does not select its fast kernels.
#include "forward.h"

#include <stddef.h>

typedef void *Handle, *Tensor, *Activation;
typedef const void* In;
typedef void* Out;

// Functions of cuDNN 9, by forward.cc, which translates their status.
extern "C" {
int cudnnGetTensorNdDescriptor(Tensor, int wanted, int* type, int* count, int* dims, int* strides);
int cudnnCreateTensorDescriptor(Tensor*);
int cudnnDestroyTensorDescriptor(Tensor);
int cudnnSetTensor4dDescriptor(Tensor, int format, int type, int n, int c, int h, int w);
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(Handle, int mode, int operation, Activation, Tensor x, size_t*);
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(Handle, int mode, int operation, Tensor x, Tensor z,
                                                             Tensor y, Tensor parameters, Activation, size_t*);
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(Handle, int mode, int operation, Tensor x, Tensor y, Tensor dy,
                                                      Tensor dz, Tensor dx, Tensor parameters, Activation, size_t*);
int cudnnBatchNormalizationForwardTrainingEx(Handle, int mode, int operation, In alpha, In beta, Tensor xd, In x, Tensor,
                                             In z, Tensor yd, Out y, Tensor pd, In scale, In bias, double factor,
                                             Out running_mean, Out running_var, double epsilon, Out mean, Out inverse,
                                             Activation, Out work, size_t work_bytes, Out reserve, size_t reserve_bytes);
int cudnnBatchNormalizationBackwardEx(Handle, int mode, int operation, In alpha, In beta, In alpha_p, In beta_p,
                                      Tensor xd, In x, Tensor, In y, Tensor dyd, In dy, Tensor, Out dz, Tensor dxd,
                                      Out dx, Tensor pd, In scale, In bias, Out dscale, Out dbias, double epsilon,
                                      In mean, In inverse, Activation, Out work, size_t work_bytes, Out reserve,
                                      size_t reserve_bytes);
}

namespace {

// cuDNN's numbers.
enum { kBadParam = 3, kNotSupported = 9 };  // statuses
enum { kHalf = 2 };                       // type
enum { kNhwc = 1 };                       // format
enum { kPersistent = 2, kNormOnly = 0 };  // the mode of MXNet's training, and the operation

// Describes float16 data of n x c x 1 x 1 in NCHW as NHWC, which is the same memory. Other data, or arrays with several
// descriptors, stay as they were.
struct Described {
  Tensor tensor;
  bool channels_last = false;

  Described(Tensor original, bool for_all) : tensor(original) {
    int type, count, dims[4], strides[4];
    if (!for_all || cudnnGetTensorNdDescriptor(original, 4, &type, &count, dims, strides) || type != kHalf ||
        count != 4 || dims[2] != 1 || dims[3] != 1 || strides[0] != dims[1] || strides[1] != 1)
      return;
    Tensor as_nhwc;
    if (cudnnCreateTensorDescriptor(&as_nhwc)) return;
    channels_last = !cudnnSetTensor4dDescriptor(as_nhwc, kNhwc, type, 1, dims[1], dims[0], 1);
    if (channels_last) tensor = as_nhwc;
    else cudnnDestroyTensorDescriptor(as_nhwc);
  }
  Described(const Described&) = delete;
  ~Described() {
    if (channels_last) cudnnDestroyTensorDescriptor(tensor);
  }
};

// Whether cuDNN keeps nothing from the forward to the backward pass besides mean and variance. cuDNN 9.19 does so.
bool keeps_nothing(Handle handle, Tensor x) {
  size_t bytes;
  return !cudnnGetBatchNormalizationTrainingExReserveSpaceSize(handle, kPersistent, kNormOnly, nullptr, x, &bytes) &&
         !bytes;
}

// Whether cuDNN computed nothing, such as for a number of channels without a fast kernel.
bool is_refusal(int status) { return status == kBadParam || status == kNotSupported; }

}  // namespace

API int cudnnBatchNormalizationForwardInference(Handle handle, int mode, In alpha, In beta, Tensor xd, In x, Tensor yd,
                                                Out y, Tensor pd, In scale, In bias, In mean, In variance,
                                                double epsilon) {
  const Described data(xd, xd == yd);
  if (data.channels_last) xd = yd = data.tensor;
  return translated(NEWER(cudnnBatchNormalizationForwardInference)(handle, mode, alpha, beta, xd, x, yd, y, pd, scale,
                                                                   bias, mean, variance, epsilon));
}

API int cudnnBatchNormalizationForwardTraining(Handle handle, int mode, In alpha, In beta, Tensor xd, In x, Tensor yd,
                                               Out y, Tensor pd, In scale, In bias, double factor, Out running_mean,
                                               Out running_var, double epsilon, Out mean, Out inverse) {
  const Described data(xd, xd == yd);
  if (data.channels_last) xd = yd = data.tensor;
  size_t bytes;
  if (data.channels_last && mode == kPersistent && keeps_nothing(handle, xd) &&
      !cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(handle, mode, kNormOnly, xd, nullptr, yd, pd, nullptr,
                                                                &bytes))
    if (void* work = workspace(handle, bytes)) {
      const int status = cudnnBatchNormalizationForwardTrainingEx(
          handle, mode, kNormOnly, alpha, beta, xd, x, nullptr, nullptr, yd, y, pd, scale, bias, factor, running_mean,
          running_var, epsilon, mean, inverse, nullptr, work, bytes, nullptr, 0);
      if (!is_refusal(status)) return status;
    }
  return translated(NEWER(cudnnBatchNormalizationForwardTraining)(handle, mode, alpha, beta, xd, x, yd, y, pd, scale,
                                                                  bias, factor, running_mean, running_var, epsilon,
                                                                  mean, inverse));
}

API int cudnnBatchNormalizationBackward(Handle handle, int mode, In alpha, In beta, In alpha_p, In beta_p, Tensor xd,
                                        In x, Tensor dyd, In dy, Tensor dxd, Out dx, Tensor pd, In scale, Out dscale,
                                        Out dbias, double epsilon, In mean, In inverse) {
  const Described data(xd, xd == dyd && xd == dxd);
  if (data.channels_last) xd = dyd = dxd = data.tensor;
  size_t bytes;
  if (data.channels_last && mode == kPersistent && mean && inverse && keeps_nothing(handle, xd) &&
      !cudnnGetBatchNormalizationBackwardExWorkspaceSize(handle, mode, kNormOnly, xd, nullptr, dyd, nullptr, dxd, pd,
                                                         nullptr, &bytes))
    if (void* work = workspace(handle, bytes)) {
      const int status = cudnnBatchNormalizationBackwardEx(
          handle, mode, kNormOnly, alpha, beta, alpha_p, beta_p, xd, x, nullptr, nullptr, dyd, dy, nullptr, nullptr, dxd,
          dx, pd, scale, nullptr, dscale, dbias, epsilon, mean, inverse, nullptr, work, bytes, nullptr, 0);
      if (!is_refusal(status)) return status;
    }
  return translated(NEWER(cudnnBatchNormalizationBackward)(handle, mode, alpha, beta, alpha_p, beta_p, xd, x, dyd, dy,
                                                           dxd, dx, pd, scale, dscale, dbias, epsilon, mean, inverse));
}

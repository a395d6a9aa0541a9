// The functions of recurrent layers that cuDNN 9 removed, by those that it has. No state is kept here: a descriptor has
// all settings, which each function reads, changes and writes.
#include "forward.h"

#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <string>
#include <vector>

typedef void *Handle, *Rnn, *RnnData, *Tensor, *Filter, *Dropout;
typedef const void* In;
typedef void* Out;

// Functions of cuDNN 9, by forward.cc, which translates their status.
extern "C" {
int cudnnGetRNNDescriptor_v8(Rnn, int* algorithm, int* cell, int* bias, int* direction, int* input_mode, int* type,
                             int* precision, int* math, int32_t* input, int32_t* hidden, int32_t* projection,
                             int32_t* layers, Dropout*, uint32_t* flags);
int cudnnSetRNNDescriptor_v8(Rnn, int algorithm, int cell, int bias, int direction, int input_mode, int type,
                             int precision, int math, int32_t input, int32_t hidden, int32_t projection, int32_t layers,
                             Dropout, uint32_t flags);
int cudnnGetTensorNdDescriptor(Tensor, int wanted, int* type, int* count, int* dims, int* strides);
int cudnnCreateTensorDescriptor(Tensor*);
int cudnnDestroyTensorDescriptor(Tensor);
int cudnnCreateRNNDataDescriptor(RnnData*);
int cudnnDestroyRNNDataDescriptor(RnnData);
int cudnnSetRNNDataDescriptor(RnnData, int type, int layout, int steps, int batch, int width, const int* lengths,
                              void* padding);
int cudnnGetRNNTempSpaceSizes(Handle, Rnn, int training, RnnData x, size_t* work, size_t* reserve);
int cudnnGetRNNWeightSpaceSize(Handle, Rnn, size_t*);
int cudnnGetRNNWeightParams(Handle, Rnn, int32_t layer, size_t bytes, In weights, int32_t gate, Tensor matrix,
                            void** matrix_at, Tensor bias, void** bias_at);
int cudnnRNNForward(Handle, Rnn, int training, const int32_t* lengths, RnnData xd, In x, RnnData yd, Out y, Tensor hd,
                    In hx, Out hy, Tensor cd, In cx, Out cy, size_t weight_bytes, In w, size_t work_bytes, Out work,
                    size_t reserve_bytes, Out reserve);
int cudnnRNNBackwardData_v8(Handle, Rnn, const int32_t* lengths, RnnData yd, In y, In dy, RnnData xd, Out dx, Tensor hd,
                            In hx, In dhy, Out dhx, Tensor cd, In cx, In dcy, Out dcx, size_t weight_bytes, In w,
                            size_t work_bytes, Out work, size_t reserve_bytes, Out reserve);
int cudnnRNNBackwardWeights_v8(Handle, Rnn, int set, const int32_t* lengths, RnnData xd, In x, Tensor hd, In hx,
                               RnnData yd, In y, size_t weight_bytes, Out dw, size_t work_bytes, Out work,
                               size_t reserve_bytes, Out reserve);
}

namespace {

// cuDNN's numbers.
enum { kNotSupported = 9 };          // status
enum { kFloat, kDouble, kHalf };     // types
enum { kDefaultMath, kTensorOp };    // math
enum { kRelu, kTanh, kLstm, kGru };  // cells
enum { kOneDirection };              // directions
enum { kUnpacked, kPacked };         // layouts of sequences
enum { kStandard, kPersistent };     // algorithms
enum { kDoubleBias = 2, kPadded = 1, kAdd = 0 };
const int32_t* const kOfDescriptor = nullptr;  // lengths of sequences on the device; cuDNN 9 copies the descriptor's

struct Settings {
  int algorithm, cell, bias, direction, input_mode, type, precision, math, input, hidden, projection, layers;
  Dropout dropout;
  uint32_t flags;

  int read(Rnn rnn) {
    return cudnnGetRNNDescriptor_v8(rnn, &algorithm, &cell, &bias, &direction, &input_mode, &type, &precision, &math,
                                    &input, &hidden, &projection, &layers, &dropout, &flags);
  }
  int write(Rnn rnn) const {
    return cudnnSetRNNDescriptor_v8(rnn, algorithm, cell, bias, direction, input_mode, type, precision, math, input,
                                    hidden, projection, layers, dropout, flags);
  }
  bool projects() const { return projection != hidden; }
  // Whether kernels that keep the weights for all steps are faster. On an H200 they take 0.2 to 0.5 of the time for 256,
  // 512 and 1,024 units in one direction and batches of 32 and 64, and 1.7 for 650 units; the host takes a tenth. cuDNN
  // documents them as fast for small batches.
  bool is_fast_if_persistent(int batch) const {
    return type == kHalf && math == kTensorOp && cell == kLstm && hidden % 64 == 0 && hidden >= 256 && hidden <= 1024 &&
           direction == kOneDirection && batch <= 64 && !projects() && !(flags & kPadded);
  }
};

template <class F> int change(Rnn rnn, F f) {
  Settings settings;
  if (int status = settings.read(rnn)) return status;
  f(settings);
  return settings.write(rnn);
}

// Sets what the older interface does not have in its descriptor: the type and the width of the inputs.
int configure(Rnn rnn, Tensor x, Settings* settings, int* batch) {
  int type, count, dims[3], strides[3];
  if (int status = cudnnGetTensorNdDescriptor(x, 3, &type, &count, dims, strides)) return status;
  if (int status = settings->read(rnn)) return status;
  *batch = dims[0];
  if (settings->type == type && settings->input == dims[1]) return 0;
  settings->type = type;
  settings->input = dims[1];
  // MXNet's RNN operator does not read its own setting, and always selects the default math for float16.
  if (type == kHalf && settings->math == kDefaultMath && setting("MXNET_CUDA_ALLOW_TENSOR_CORE", 1))
    settings->math = kTensorOp;
  if (settings->is_fast_if_persistent(*batch)) settings->algorithm = kPersistent;
  return settings->write(rnn);
}

struct Spaces { size_t work, reserve; };

// The sizes for sequences of `steps`, both for training and prediction.
int spaces(Handle handle, Rnn rnn, int steps, Tensor x, Spaces* sizes) {
  Settings settings;
  int batch;
  if (int status = configure(rnn, x, &settings, &batch)) return status;
  RnnData data;
  if (int status = cudnnCreateRNNDataDescriptor(&data)) return status;
  const std::vector<int> lengths(batch, steps);
  int status = cudnnSetRNNDataDescriptor(data, settings.type, settings.flags & kPadded ? kUnpacked : kPacked, steps,
                                         batch, settings.input, lengths.data(), nullptr);
  Spaces prediction{}, training{};
  const auto prediction_status = [&] {
    return cudnnGetRNNTempSpaceSizes(handle, rnn, 0, data, &prediction.work, &prediction.reserve);
  };
  if (!status) status = prediction_status();
  if (status && settings.algorithm == kPersistent) {  // not for this GPU or batch
    settings.algorithm = kStandard;
    status = settings.write(rnn);
    if (!status) status = prediction_status();
  }
  if (!status) status = cudnnGetRNNTempSpaceSizes(handle, rnn, 1, data, &training.work, &training.reserve);
  cudnnDestroyRNNDataDescriptor(data);
  *sizes = {std::max(prediction.work, training.work), training.reserve};
  sizes->work = (sizes->work + 7) / 8 * 8;  // MXNet allocates whole elements
  return status;
}

// The tensors that describe a matrix and a bias.
struct Description {
  Tensor matrix = nullptr, bias = nullptr;
  ~Description() {
    if (matrix) cudnnDestroyTensorDescriptor(matrix);
    if (bias) cudnnDestroyTensorDescriptor(bias);
  }
  int create() {
    const int status = cudnnCreateTensorDescriptor(&matrix);
    return status ? status : cudnnCreateTensorDescriptor(&bias);
  }
};

bool has_shape(Tensor tensor, int rows, int columns) {
  int type, count, dims[3], strides[3];
  return !cudnnGetTensorNdDescriptor(tensor, 3, &type, &count, dims, strides) && count == 3 && dims[0] == 1 &&
         dims[1] == rows && dims[2] == columns;
}

// Checks that cuDNN reads each weight where MXNet stores it: for each layer and direction the matrices of inputs, of
// states and of the projection; then all biases in the same order. `bytes`: the size of all.
int check_layout(Handle handle, Rnn rnn, const Settings& s, size_t bytes) {
  const int gates = s.cell == kLstm ? 4 : s.cell == kGru ? 3 : 1, ways = s.direction + 1;
  const size_t width = s.type == kDouble ? 8 : s.type == kHalf ? 2 : 4;
  char *const begin = (char*)4096, *first_bias = nullptr;  // cuDNN computes addresses, and reads nothing
  size_t matrices = 0, biases = 0;                         // bytes of those before
  bool same = true;
  Description one;
  if (int status = one.create()) return status;
  for (int layer = 0; layer < s.layers * ways; layer++)
    for (int gate = 0; gate < 2 * gates + s.projects(); gate++) {
      void *matrix = nullptr, *bias = nullptr;
      if (int status = cudnnGetRNNWeightParams(handle, rnn, layer, bytes, begin, gate, one.matrix, &matrix, one.bias,
                                               &bias))
        return status;
      const bool projects = gate == 2 * gates;
      const int rows = projects ? s.projection : s.hidden;
      const int columns = projects ? s.hidden : gate >= gates ? s.projection : layer < ways ? s.input : s.projection * ways;
      same &= matrix == begin + matrices && has_shape(one.matrix, rows, columns);
      matrices += rows * columns * width;
      if (projects) continue;
      if (!first_bias) first_bias = (char*)bias;
      same &= bias == first_bias + biases && has_shape(one.bias, s.hidden, 1);
      biases += s.hidden * width;
    }
  same &= first_bias == begin + matrices && matrices + biases == bytes;
  return same ? 0 : forward_error(kNotSupported, "this cuDNN stores weights of recurrent layers in another order than MXNet");
}

int forward(int training, Handle handle, Rnn rnn, RnnData xd, In x, Tensor hd, In hx, Tensor cd, In cx, In w, RnnData yd,
            Out y, Out hy, Out cy, Out work, size_t work_bytes, Out reserve, size_t reserve_bytes) {
  size_t bytes;
  if (int status = cudnnGetRNNWeightSpaceSize(handle, rnn, &bytes)) return status;
  return cudnnRNNForward(handle, rnn, training, kOfDescriptor, xd, x, yd, y, hd, hx, hy, cx ? cd : nullptr, cx, cy,
                         bytes, w, work_bytes, work, reserve_bytes, reserve);
}

}  // namespace

API int cudnnSetRNNDescriptor_v6(Handle, Rnn rnn, int hidden, int layers, Dropout dropout, int input_mode, int direction,
                                 int cell, int algorithm, int precision) {
  // Until `configure`, the type is that of the sums, and inputs are as wide as states.
  return Settings{algorithm, cell,   kDoubleBias, direction, input_mode, precision, precision, kDefaultMath,
                  hidden,    hidden, hidden,      layers,    dropout,    0}.write(rnn);
}

API int cudnnSetRNNMatrixMathType(Rnn rnn, int math) {
  return change(rnn, [&](Settings& settings) { settings.math = math; });
}

API int cudnnSetRNNProjectionLayers(Handle, Rnn rnn, int recurrent, int) {
  return change(rnn, [&](Settings& settings) { settings.projection = recurrent; });
}

API int cudnnSetRNNPaddingMode(Rnn rnn, unsigned padded) {
  return change(rnn, [&](Settings& settings) { settings.flags = padded; });
}

// On an H200, cuDNN 9.19 accepts a range, and returns cells outside of it and other gradients than of clipped cells.
API int cudnnRNNSetClip(Handle, Rnn, int mode, int, double, double) {
  return mode ? forward_error(kNotSupported, "cuDNN 9 does not clip the cells of LSTMs to a range; cuDNN 8 does, "
                                             "which the extra cu112 installs")
              : 0;
}

API int cudnnGetRNNWorkspaceSize(Handle handle, Rnn rnn, int steps, const Tensor* x, size_t* bytes) {
  Spaces sizes;
  const int status = spaces(handle, rnn, steps, x[0], &sizes);
  if (!status) *bytes = sizes.work;
  return status;
}

API int cudnnGetRNNTrainingReserveSize(Handle handle, Rnn rnn, int steps, const Tensor* x, size_t* bytes) {
  Spaces sizes;
  const int status = spaces(handle, rnn, steps, x[0], &sizes);
  if (!status) *bytes = sizes.reserve;
  return status;
}

API int cudnnGetRNNParamsSize(Handle handle, Rnn rnn, Tensor x, size_t* bytes, int) {
  Settings settings;
  int batch;
  if (int status = configure(rnn, x, &settings, &batch)) return status;
  if (int status = cudnnGetRNNWeightSpaceSize(handle, rnn, bytes)) return status;
  return check_layout(handle, rnn, settings, *bytes);
}

// The arguments without names are of attention, which cuDNN never had here.
API int cudnnRNNForwardTrainingEx(Handle handle, Rnn rnn, RnnData xd, In x, Tensor hd, In hx, Tensor cd, In cx, Filter,
                                  In w, RnnData yd, Out y, Tensor, Out hy, Tensor, Out cy, RnnData, In, RnnData, Out,
                                  RnnData, Out, RnnData, Out, Out work, size_t work_bytes, Out reserve,
                                  size_t reserve_bytes) {
  return forward(1, handle, rnn, xd, x, hd, hx, cd, cx, w, yd, y, hy, cy, work, work_bytes, reserve, reserve_bytes);
}

API int cudnnRNNForwardInferenceEx(Handle handle, Rnn rnn, RnnData xd, In x, Tensor hd, In hx, Tensor cd, In cx, Filter,
                                   In w, RnnData yd, Out y, Tensor, Out hy, Tensor, Out cy, RnnData, In, RnnData, Out,
                                   RnnData, Out, RnnData, Out, Out work, size_t work_bytes) {
  return forward(0, handle, rnn, xd, x, hd, hx, cd, cx, w, yd, y, hy, cy, work, work_bytes, nullptr, 0);
}

API int cudnnRNNBackwardDataEx(Handle handle, Rnn rnn, RnnData yd, In y, RnnData, In dy, RnnData, In, Tensor, In dhy,
                               Tensor, In dcy, Filter, In w, Tensor hd, In hx, Tensor cd, In cx, RnnData xd, Out dx,
                               Tensor, Out dhx, Tensor, Out dcx, RnnData, Out, Out work, size_t work_bytes, Out reserve,
                               size_t reserve_bytes) {
  size_t bytes;
  if (int status = cudnnGetRNNWeightSpaceSize(handle, rnn, &bytes)) return status;
  return cudnnRNNBackwardData_v8(handle, rnn, kOfDescriptor, yd, y, dy, xd, dx, hd, hx, dhy, dhx, cx ? cd : nullptr, cx,
                                 dcy, dcx, bytes, w, work_bytes, work, reserve_bytes, reserve);
}

API int cudnnRNNBackwardWeightsEx(Handle handle, Rnn rnn, RnnData xd, In x, Tensor hd, In hx, RnnData yd, In y, Out work,
                                  size_t work_bytes, Filter, Out dw, Out reserve, size_t reserve_bytes) {
  size_t bytes;
  if (int status = cudnnGetRNNWeightSpaceSize(handle, rnn, &bytes)) return status;
  return cudnnRNNBackwardWeights_v8(handle, rnn, kAdd, kOfDescriptor, xd, x, hd, hx, yd, y, bytes, dw, work_bytes, work,
                                    reserve_bytes, reserve);
}

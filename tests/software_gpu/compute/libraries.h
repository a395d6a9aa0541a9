// The computations of cuBLAS, cuDNN and NCCL. Scalars alpha and beta are float32, or double for double arrays.
#pragma once
#include "../record/dnn.h"
#include "compute.h"

Type of_cuda(int type);   // cudaDataType and cudnnDataType_t agree on float, double, half, int8

struct Factor { const void* data; Type type; bool transposed; int ld; ll stride; };
// c = alpha * a * b + beta * c for column-major matrices.
void multiply(int m, int n, int k, const Factor& a, const Factor& b, const Factor& c, double alpha, double beta,
              Sums sums, int batch);

double scalar(V pointer, D tensor);  // alpha or beta of a call

void convolution_forward(V alpha, D xd, V x, D wd, V w, D conv, V beta, D yd, V y);
void convolution_data(V alpha, D wd, V w, D yd, V dy, D conv, V beta, D xd, V dx);
void convolution_weight(V alpha, D xd, V x, D yd, V dy, D conv, V beta, D wd, V dw);
void bias_gradient(V alpha, D yd, V dy, V beta, D bd, V db);
void add_tensor(V alpha, D ad, V a, V beta, D cd, V c);

struct Norm {
  int mode;
  V alpha, beta;
  D xd, pd;  // data, parameters
  double epsilon, factor;
  bool relu = false;  // of the result and, if it is not null, z
  V z = nullptr;
};
void norm_training(const Norm& norm, V x, V y, V gamma, V bias, V running_mean, V running_var, V mean, V inverse);
void norm_inference(const Norm& norm, V x, V y, V gamma, V bias, V mean, V variance);
// y and dz: null without a ReLU, and without an addition
void norm_backward(const Norm& norm, V alpha_parameters, V beta_parameters, V x, V y, V dy, V dz, V dx, V gamma, V dgamma,
                   V dbias, V mean, V inverse);

void activation(D a, V alpha, D xd, V x, V beta, D yd, V y);
void activation_backward(D a, V alpha, D yd, V y, V dy, V x, V beta, V dx);
void pooling(D p, V alpha, D xd, V x, V beta, D yd, V y);
void pooling_backward(D p, V alpha, D yd, V y, V dy, D xd, V x, V beta, V dx);
void softmax(int algorithm, int mode, V alpha, D xd, V x, V beta, V y);
void softmax_backward(int algorithm, int mode, V alpha, D yd, V y, V dy, V beta, V dx);
void dropout(D d, D xd, V x, V y, V reserve);
void dropout_backward(D d, D xd, V dy, V dx, V reserve);

// The count of an RNN's parameters, for inputs of this width.
ll rnn_parameters(D r, ll width);
// A matrix and its bias: places in the parameters, -1 for none. `layer` counts directions, `gate` matrices.
struct RnnPart { ll matrix, rows, columns, bias; };
RnnPart rnn_part(D r, int layer, int gate);
// reserve: null in prediction
void rnn_forward(D r, D xd, V x, V h, V c, V w, V y, V hy, V cy, V reserve);
void rnn_data(D r, D yd, V dy, V dhy, V dcy, V w, V dx, V dh, V dc, V reserve);
void rnn_weights(D xd, V dw, V reserve);

void add_up(const std::vector<const void*>& from, void* to, size_t count, Type type);  // for NCCL

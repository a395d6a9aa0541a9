#include "dispatch/repairs.h"

#include <omp.h>
#include <pthread.h>

#include <sstream>

#include "dispatch/gradients.h"
#include "gpu.h"
#include "onednn/depth.h"

namespace gluon_amp {

bool repairs_empty_calls = false;

namespace {

void repair_weight_gradients() {
  for (const char* name : {"_backward_Convolution", "_backward_Deconvolution"}) {
    nnvm::Op& op = op_named(name);
    if (const auto* original = get<mxnet::FComputeEx>(&op, "FComputeEx<cpu>"))
      set<mxnet::FComputeEx>(op, "FComputeEx<cpu>",
                             with_right_depth(*original, op.name == "_backward_Deconvolution"));
  }
}

void repair_dense_gradients() {
  set<nnvm::FGradient>(op_named("_backward_FullyConnected"), "FGradient", gradient_of_dense_gradient);
}

void repair_hard_sigmoid() {
  set<nnvm::FInplaceIdentity>(op_named("_backward_hard_sigmoid"), "FInplaceIdentity",
                              [](const NodeAttrs&) { return std::vector<bool>{false}; });
}

void repair_pooling() {
  replace<mxnet::FComputeEx>(
      op_named("Pooling"), "FComputeEx<cpu>",
      [](const auto& original, const auto& attrs, const auto& context, const auto& in, const auto& req,
         const auto& out) {
        OpContext recorded = context;
        recorded.is_train |= req.size() > 1 && req[1] != mxnet::kNullOp;
        original(attrs, recorded, in, req, out);
      });
}

void repair_empty_calls() {
  repairs_empty_calls = true;
  undo.push_back([] { repairs_empty_calls = false; });
}

// A fork has one thread. Threads that it starts have pools of their own.
void repair_forks() {
  static const int once = pthread_atfork(nullptr, nullptr, [] { omp_set_num_threads(1); });
  static_cast<void>(once);
}

const struct {
  const char *defect, *operators, *test;
  void (*repair)();
} kRepairs[] = {
    {"3-D convolutions: weight gradients with wrong or uninitialized planes. Convolutions without a bias: "
     "weight gradients that were not requested",
     "_backward_Convolution _backward_Deconvolution",
     "tests/cpu/test_weight_gradients.py::test_gradients_of_three_axes", repair_weight_gradients},
    {"Dense layers: second-order gradients lack a term",
     "_backward_FullyConnected",
     "tests/cpu/test_engine_networks.py::test_second_gradients_of_dense_layers_match_numeric_ones",
     repair_dense_gradients},
    {"hard_sigmoid: its gradient is the incoming one, unchanged, or overwrites it",
     "_backward_hard_sigmoid",
     "tests/cpu/test_repairs.py::test_gradient_of_hard_sigmoid", repair_hard_sigmoid},
    {"Max pooling, recorded in predict mode: its gradient reads indices that were not written",
     "Pooling",
     "tests/cpu/test_repairs.py::test_gradient_of_recorded_prediction_of_pooling", repair_pooling},
    {"Empty arrays: a division by zero ends the process, or other memory is read",
     "all",
     "tests/cpu/test_engine_types.py::test_calls_with_empty_results_return", repair_empty_calls},
    {"Loops and conditions: uninitialized rows and gradients; an error for Embedding",
     "_while_loop _backward_while_loop _backward_cond _backward_Embedding",
     "tests/cpu/test_loops.py::test_rows_of_rounds_that_do_not_run_are_zero", initialize_loops},
    {"CustomOp and autograd.Function: arrays in oneDNN's layout are read after they are freed; an exit "
     "meanwhile hangs or aborts",
     "Custom _backward_Custom _backward_CustomFunction",
     "tests/cpu/test_user_code.py::test_process_exits_after_its_custom_operators", guard_user_code},
    {"Dropout on a GPU: a second backward pass drops nothing",
     "_backward_Dropout",
     "tests/software_gpu/recorded/test_gpu_networks.py::"
     "test_dropout_costs_as_in_float32_and_supports_repeated_backward", keep_masks},
    {"Forked processes: they wait forever for threads of their parent",
     "all",
     "tests/cpu/test_engine_safe.py::test_fork_of_an_engine_without_threads_computes", repair_forks},
};

}  // namespace

void repair() {
  for (const auto& row : kRepairs) row.repair();
}

std::string repair_rows() {
  std::ostringstream rows;
  for (const auto& row : kRepairs) rows << row.defect << '\t' << row.operators << '\t' << row.test << '\n';
  return rows.str();
}

}  // namespace gluon_amp

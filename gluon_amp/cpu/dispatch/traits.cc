#include "dispatch/traits.h"

#include <map>
#include <sstream>

namespace gluon_amp {
namespace {

const struct { Trait trait; const char* names; } kRows[] = {
    // They hold graphs, are asynchronous, copy between devices, compare pointers, or have outputs of dynamic
    // shapes.
    {kRunsInMXNet, R"(
        _foreach _while_loop _cond _CachedOp _CachedOpThreadSafe
        _backward_foreach _backward_while_loop _backward_cond _backward_CachedOp
        Custom _CustomFunction _NDArray _Native
        _backward_Custom _backward_CustomFunction _backward__NDArray _backward__Native
        _copyto _CrossDeviceCopy _backward__CrossDeviceCopy
        _contrib_boolean_mask _backward_contrib_boolean_mask _npi_delete _npi_unique
        _npx_nonzero _npi_share_memory _npi_bincount _npi_boolean_mask_assign_scalar
        _npi_boolean_mask_assign_tensor _scatter_set_nd
    )"},
    {kMoves, R"(
        Reshape Flatten expand_dims squeeze reshape_like BlockGrad _copy _zeros _zeros_without_dtype
        _ones _full _eye zeros_like ones_like _npx_reshape _np_reshape _np_squeeze
    )"},
    // Backward passes that do not write the gradients of labels and lengths, or of values that no sum reads. In
    // MXNet these keep their initial zeros.
    {kLeavesOutputs, R"(
        _backward_SoftmaxOutput _backward_SVMOutput _backward_linear_reg_out
        _backward_logistic_reg_out _backward_mae_reg_out _backward_ctc_loss
        _backward_SequenceMask _backward_SequenceLast _backward_SequenceReverse
        _backward_npi_einsum _backward__contrib_MultiBoxTarget _contrib_backward_index_copy
    )"},
    // The middle of an odd width or height, and images with one channel.
    {kLeavesInput, R"(
        _image_flip_left_right _image_flip_top_bottom _image_random_flip_left_right
        _image_random_flip_top_bottom _image_adjust_lighting _image_random_lighting
    )"},
    {kRefusesFloat16, R"(
        Crop IdentityAttachKLSparseReg _contrib_MultiBoxPrior _contrib_MultiBoxTarget
        _contrib_MultiBoxDetection _contrib_Proposal _contrib_MultiProposal _linalg_det
        _linalg_slogdet _npi_eig _npi_eigh _npi_eigvals _npi_eigvalsh _npi_solve
        _npi_pinv _npi_pinv_scalar_rcond _npi_tensorinv _npi_tensorsolve _npi_around
    )"},
    // They divide by the size of an axis, read an array that has no elements, or do not write their result.
    {kRefusesEmpty, R"(
        RNN _backward_RNN SequenceLast _backward_SequenceLast _backward_SequenceMask _backward_SequenceReverse
        take batch_take pick gather_nd _np_diagflat _npi_percentile _npi_pad _contrib_index_copy
        BatchNorm BatchNorm_v1 _contrib_BatchNormWithReLU _contrib_SyncBatchNorm
        _contrib_bipartite_matching _contrib_Proposal _contrib_MultiProposal _contrib_PSROIPooling
        _contrib_ModulatedDeformableConvolution _backward__contrib_ModulatedDeformableConvolution
    )"},
    {kPushesWeight, "Convolution Deconvolution FullyConnected"},
    {kHasParameters, R"(
        Convolution FullyConnected
        _backward_Convolution _backward_FullyConnected _backward_backward_FullyConnected
    )"},
    {kForgetsBias, "_backward_FullyConnected"},
    {kCasts, "Cast amp_cast amp_multicast"},
};

}  // namespace

unsigned traits_of(const std::string& name) {
  static const auto* table = [] {
    auto* made = new std::map<std::string, unsigned>;
    for (const auto& row : kRows) {
      std::istringstream names(row.names);
      for (std::string each; names >> each;) (*made)[each] |= row.trait;
    }
    return made;
  }();
  const auto found = table->find(name);
  return found == table->end() ? 0 : found->second;
}

std::vector<size_t> moving_averages_of(const std::string& name) {
  static const auto* table = new std::map<std::string, std::vector<size_t>>{
      {"BatchNorm", {3, 4}}, {"_backward_BatchNorm", {6, 7}},
      {"_contrib_BatchNormWithReLU", {3, 4}}, {"_backward_contrib_BatchNormWithReLU", {6, 7}},
      {"_contrib_SyncBatchNorm", {3, 4}}, {"_backward__contrib_SyncBatchNorm", {5, 6}},
      {"BatchNorm_v1", {3, 4}}, {"_backward_BatchNorm_v1", {5, 6}},
      {"_backward_IdentityAttachKLSparseReg", {2}}};
  const auto found = table->find(name);
  return found == table->end() ? std::vector<size_t>() : found->second;
}

}  // namespace gluon_amp

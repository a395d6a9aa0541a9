// The table of hand-written kernels.
#include "operators/own.h"

namespace gluon_amp {

const Rows& all_rows() {
  static const Rows* rows = [] {
    auto* made = new Rows;
    add_broadcast(*made);
    add_convolution(*made);
    add_copies(*made);
    add_dense(*made);
    add_dropout(*made);
    add_elementwise(*made);
    add_embedding(*made);
    add_images(*made);
    add_norms(*made);
    add_pad(*made);
    add_pooling(*made);
    add_products(*made);
    add_updates(*made);
    return made;
  }();
  return *rows;
}

const OwnKernel* own_kernel(const std::string& name) {
  auto found = all_rows().find(name);
  return found == all_rows().end() ? nullptr : &found->second;
}

}  // namespace gluon_amp

// The table of hand-written kernels.
#include "operators/own.h"

namespace gluon_amp {

const Rows& all_rows() {
  static const Rows* rows = [] {
    auto* table = new Rows;
    add_broadcast(*table);
    add_convolution(*table);
    add_copies(*table);
    add_dense(*table);
    add_dropout(*table);
    add_elementwise(*table);
    add_embedding(*table);
    add_images(*table);
    add_norms(*table);
    add_pad(*table);
    add_pooling(*table);
    add_products(*table);
    add_updates(*table);
    return table;
  }();
  return *rows;
}

const OwnKernel* own_kernel(const std::string& name) {
  auto row = all_rows().find(name);
  return row == all_rows().end() ? nullptr : &row->second;
}

}  // namespace gluon_amp

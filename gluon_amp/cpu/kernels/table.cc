// The table of functions for this instruction set.
#include "vector.h"

#define JOIN_NAMES(a, b) a##b
#define JOIN(a, b) JOIN_NAMES(a, b)
#define QUOTE_NAME(a) #a
#define QUOTE(a) QUOTE_NAME(a)

namespace gluon_amp {
namespace ISA {
namespace {

Kernels filled() {
  Kernels table = {};
  table.name = QUOTE(ISA);
  add_passes(&table);
  add_elementwise(&table);
  add_batch_norm(&table);
  add_rows(&table);
  add_training(&table);
#ifdef BFLOAT16
  add_rnn(&table);
#endif
  add_updates(&table);
  add_counts(&table);
  return table;
}

}  // namespace
}  // namespace ISA

// kernels_for_avx512, kernels_for_avx512_bfloat16 and so on
const Kernels* JOIN(kernels_for_, ISA)() {
  static const Kernels table = ISA::filled();
  return &table;
}

}  // namespace gluon_amp

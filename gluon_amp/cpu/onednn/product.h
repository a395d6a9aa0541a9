// oneDNN's primitives of bfloat16 arrays, their cache, and reorders between layouts.
#pragma once
#include "operators/table.h"

namespace gluon_amp {

// oneDNN 2.4 uses AMX only if DNNL_MAX_CPU_ISA names it. Processors with AMX multiply bfloat16 numbers without it
// more slowly than float32 ones: there AVX512_BF16 must be named too.
enum class Instructions { kNone, kBfloat16, kAmx };
Instructions instructions();

constexpr int kForward = dnnl_forward_training, kBackwardData = dnnl_backward_data,
              kBackwardWeights = dnnl_backward_weights;

using Sizes = std::vector<int64_t>;

// An array that a primitive reads or writes; `images`: where not 0, its layout is a matrix with a row for
// each place of so many images, and memory has their channels.
struct Operand {
  int argument;  // DNNL_ARG_*
  const TBlob& array;
  dnnl_memory_desc_t plain;  // how its numbers lie in memory
  Write write = kNothing;    // of a result
  int64_t images = 0;
};

// A primitive for one set of shapes, with the reorders between its layouts and plain arrays.
class Product {
 public:
  struct Way {  // of one argument
    dnnl_memory_desc_t inside;
    bool same = false;  // as in memory
    // Channels-last or oneDNN's layout is a transpose of so many matrices of channels and places.
    int64_t matrices = 0, channels = 0, places = 0;
    onednn::Primitive reorder;  // where it is no transpose

    bool is_like(const Way& other) const;
    void enter(const Operand& operand, void* to) const;
    void leave(const Operand& operand, void* from, void* to) const;
  };

  // Arrays in layouts of primitives, for several products that read the same.
  class Inside {
   public:
    void* enter(const Operand& operand, const Way& way);

   private:
    struct Held {
      const void* array;
      Way way;
      void* memory;
    };
    Scratch scratch_;
    std::vector<Held> held_;
  };

  // Returns the cached product of this key, or a new one of the description that `make` returns. Null where
  // oneDNN has no implementation.
  using Make = std::function<onednn::Description()>;
  static std::shared_ptr<Product> find(const std::string& key, const Make& make);

  // All arguments of the primitive. Under the lock `scratch_lock()`.
  void run(const std::vector<Operand>& operands, Inside* read);
  void run(const std::vector<Operand>& operands) {
    Inside read;
    run(operands, &read);
  }

 private:
  explicit Product(onednn::Description description);
  Way& way(const Operand& operand);

  onednn::Description description_;
  onednn::Primitive primitive_;
  std::map<std::pair<int, bool>, Way> ways_;  // of each argument: from plain memory, and from oneDNN's layout
};

dnnl_memory_desc_t layout(const Sizes& dims, int tag, int type = dnnl_bf16);
onednn::Description describe(const void* operation, const onednn::Description* hint = nullptr);

// A layout of any strides, which the primitive chooses, and the plain one.
dnnl_memory_desc_t any_layout(const Sizes& dims, int type = dnnl_bf16);
dnnl_memory_desc_t plain_layout(const Sizes& dims, int type = dnnl_bf16);

// A name of a primitive for `Product::find`.
std::string key_of(const char* name, int pass, std::initializer_list<const Sizes*> all);

Sizes sizes_of(const TBlob& array);
inline int type_in_memory(const TBlob& array) { return is_float(array) ? dnnl_f32 : dnnl_bf16; }

// Whether results of this type are computed by these primitives. Those of watched nodes are not, because they are
// counted before rounding.
bool multiplies(int type);

}  // namespace gluon_amp

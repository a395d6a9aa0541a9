// Products of bfloat16 arrays by oneDNN's own primitives, where the processor has instructions for them.
#pragma once
#include "operators/own.h"

namespace gluon_amp {

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
    // Channels last, or in blocks, is a transpose of so many matrices of channels and places.
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
    Lease lease_;
    std::vector<Held> held_;
  };

  // Returns the cached product of this key, or a new one of the description that `make` returns. Null where
  // oneDNN has no implementation.
  using Make = std::function<onednn::Description()>;
  static std::shared_ptr<Product> find(const std::string& key, const Make& make);

  // All arguments of the primitive. Under the lock `turn()`.
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
  std::map<std::pair<int, bool>, Way> ways_;  // of each argument: from plain memory, and from blocks
};

dnnl_memory_desc_t layout(const Sizes& dims, int tag, int type = dnnl_bf16);
onednn::Description describe(const void* operation, const onednn::Description* hint = nullptr);

// Whether arrays between convolutions are to lie in the blocks that those read and write.
bool keeps_blocks();

// By oneDNN; false where it has no primitive, or the processor no instructions.
bool onednn_convolution(const Call& call, bool backward);
bool onednn_deconvolution(const Call& call, bool backward);
bool onednn_dense(const Call& call, bool backward);
bool onednn_batch_dot(const Call& call);

// Products of a dense layer's matrices, rows of x, of w and of y, into a float32 one: forward x and w into
// y; data dy and w into dx; weight dy and x into dw. Under the lock `turn()`.
enum class DensePass { kForward, kData, kWeight };
bool onednn_rows(DensePass of, int64_t rows, int64_t outputs, int64_t inputs, const Half* a, const Half* b,
                 float* to, Product::Inside* read);

}  // namespace gluon_amp

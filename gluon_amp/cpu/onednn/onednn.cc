// Products of bfloat16 arrays by oneDNN's primitives: bfloat16 instructions, sums in float32, each result
// rounded once. Primitives choose their layouts. Arrays are plain, or in blocks of
// channels (blocks.h), and are reordered where a primitive has another layout.
#include "onednn/onednn.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "dispatch/blocks.h"
#include "dispatch/watch.h"
#include "onednn/depth.h"

namespace gluon_amp {
namespace {

constexpr int kForward = dnnl_forward_training, kBackwardData = dnnl_backward_data,
              kBackwardWeights = dnnl_backward_weights;

// The processor's flags AMX-BF16 and AMX-TILE.
bool has_amx() {
  unsigned a, b, c, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
}

// Linux saves the registers of AMX for processes that request it; in others the instructions raise SIGILL.
bool may_use_amx() {
  constexpr int kRequest = 0x1023, kTiles = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTiles) == 0;
}

// oneDNN 2.4 uses AMX only if DNNL_MAX_CPU_ISA names it. Processors with AMX multiply bfloat16 numbers without it
// more slowly than float32 ones: there AVX512_BF16 must be named too.
enum class Instructions { kNone, kBfloat16, kAmx };
Instructions instructions() {
  static const Instructions has = [] {
    const char* const given = std::getenv("DNNL_MAX_CPU_ISA");
    const std::string most = given && *given ? given : "DEFAULT";
    if (!onednn::can_call_onednn() || std::strcmp(kernels->name, "avx512") ||
        !__builtin_cpu_supports("avx512bf16"))
      return Instructions::kNone;
    if (most == "AVX512_CORE_AMX")
      return has_amx() && may_use_amx() ? Instructions::kAmx : Instructions::kNone;
    return most == "AVX512_CORE_BF16" || ((most == "DEFAULT" || most == "ALL") && !has_amx())
               ? Instructions::kBfloat16 : Instructions::kNone;
  }();
  return has;
}

const onednn::Engine& engine() { return *static_cast<const onednn::Engine*>(onednn::cpu_engine()); }

const onednn::Stream& stream() {
  static const onednn::Stream* const made = [] {
    auto* stream = new onednn::Stream;
    onednn::make_stream(stream, engine(), dnnl_stream_default_flags);
    return stream;
  }();
  return *made;
}

onednn::Memory memory(const dnnl_memory_desc_t& layout, void* at) {
  onednn::Memory made;
  onednn::make_memory(&made, layout, engine(), at);
  return made;
}

onednn::Primitive primitive(const onednn::Handle& description) {
  onednn::Primitive made;
  onednn::make_primitive(&made, description.get());
  return made;
}

onednn::Primitive reorder(const dnnl_memory_desc_t& from, const dnnl_memory_desc_t& to) {
  static const onednn::Attributes* const none = [] {
    auto* attributes = new onednn::Attributes;
    onednn::make_attributes(attributes);
    return attributes;
  }();
  onednn::ReorderDescription made;
  onednn::make_reorder(&made, memory(from, nullptr), memory(to, nullptr), *none, false);
  return primitive(made);
}

// The memory of this number of elements of a layout's type, in floats.
int64_t room_for(int64_t numbers, const dnnl_memory_desc_t& layout) {
  return layout.data_type == dnnl_bf16 ? (numbers + 1) / 2 : numbers;
}
int64_t room_for(const dnnl_memory_desc_t& layout) {
  int64_t n = 1;
  for (int i = 0; i < layout.ndims; ++i) n *= layout.padded_dims[i];
  return room_for(n, layout);
}

// Whether results of this type are computed by these primitives. Those of watched nodes are not, because they are
// counted before rounding.
bool multiplies(int type) {
  return type == mshadow::kBfloat16 && instructions() != Instructions::kNone && !watching() && !generic_only;
}

bool overlap(const TBlob& a, const TBlob& b) {
  const auto begin = [](const TBlob& array) { return static_cast<const char*>(array.dptr_); };
  const auto end = [&](const TBlob& array) {
    return begin(array) + size(array) * mshadow::mshadow_sizeof(array.type_flag_);
  };
  return begin(a) < end(b) && begin(b) < end(a);
}

int type_in_memory(const TBlob& array) { return is_float(array) ? dnnl_f32 : dnnl_bf16; }

constexpr dnnl_format_tag_t kPlain[] = {dnnl_format_tag_undef, dnnl_a, dnnl_ab, dnnl_abc, dnnl_abcd,
                                        dnnl_abcde, dnnl_abcdef};
constexpr dnnl_format_tag_t kInBlocks[] = {dnnl_format_tag_undef, dnnl_format_tag_undef, dnnl_format_tag_undef,
                                           dnnl_aBc16b, dnnl_aBcd16b, dnnl_aBcde16b};

}  // namespace

dnnl_memory_desc_t layout(const Sizes& dims, int tag, int type) {
  dnnl_memory_desc_t made;
  std::memset(&made, 0, sizeof made);
  onednn::make_layout(&made, dims, type, tag, false);
  return made;
}

onednn::Description describe(const void* operation, const onednn::Description* hint) {
  onednn::Description made;
  onednn::make_description(&made, operation, nullptr, engine(), hint ? hint->get() : nullptr, true);
  return made;
}

Product::Product(onednn::Description description)
    : description_(std::move(description)), primitive_(primitive(description_)) {}

std::shared_ptr<Product> Product::find(const std::string& key, const Make& make) {
  static std::mutex lock;
  static auto& made = *new std::map<std::string, std::shared_ptr<Product>>;
  constexpr size_t kMost = 1000;
  const std::lock_guard<std::mutex> guard(lock);
  const auto found = made.find(key);
  if (found != made.end()) return found->second;
  if (made.size() >= kMost) made.clear();
  onednn::Description description = make();
  auto& product = made[key];
  if (description.get()) product.reset(new Product(std::move(description)));
  return product;
}

bool Product::Way::is_like(const Way& other) const {
  return matrices ? matrices == other.matrices && channels == other.channels && places == other.places
                  : !other.matrices && !std::memcmp(&inside, &other.inside, sizeof inside);
}

void* Product::Inside::enter(const Operand& operand, const Way& way) {
  for (const Held& held : held_)
    if (held.array == operand.array.dptr_ && held.way.is_like(way)) return held.memory;
  void* const made = lease_.memory(room_for(way.inside));
  way.enter(operand, made);
  held_.push_back({operand.array.dptr_, way, made});
  return made;
}

namespace {

// The channels of a block if `inside` is channels-last images or has whole blocks of channels; else 0.
int64_t channels_of_block(const dnnl_memory_desc_t& inside, const dnnl_memory_desc_t& plain) {
  const int axes = inside.ndims;
  const auto &in = inside.format_desc.blocking, &out = plain.format_desc.blocking;
  if (inside.data_type != dnnl_bf16 || plain.data_type != dnnl_bf16 || axes < 3 ||
      inside.format_kind != dnnl_blocked || inside.offset0 || in.inner_nblks > 1 || out.inner_nblks)
    return 0;
  const int64_t channels = inside.dims[1];
  const int64_t block = in.inner_nblks ? in.inner_blks[0] : channels;
  if ((in.inner_nblks && in.inner_idxs[0] != 1) || channels % block) return 0;
  int64_t step = block;  // the stride of positions
  for (int k = axes; k-- > 2; step *= inside.dims[k])
    if (in.strides[k] != step || out.strides[k] * block != step) return 0;
  if (in.inner_nblks ? in.strides[1] != step : in.strides[1] != 1) return 0;
  return in.strides[0] == step * (channels / block) && out.strides[1] * block == step &&
                 out.strides[0] == in.strides[0]
             ? block : 0;
}

}  // namespace

void Product::Way::enter(const Operand& operand, void* to) const {
  if (matrices)
    kernels->transpose(halves(operand.array), static_cast<Half*>(to), matrices, channels, places);
  else
    onednn::execute(&reorder, stream(), {{DNNL_ARG_FROM, memory(operand.plain, operand.array.dptr_)},
                                         {DNNL_ARG_TO, memory(inside, to)}});
}

void Product::Way::leave(const Operand& operand, void* from, void* to) const {
  if (matrices)
    kernels->transpose(static_cast<Half*>(from), static_cast<Half*>(to), matrices, places, channels);
  else
    onednn::execute(&reorder, stream(), {{DNNL_ARG_FROM, memory(inside, from)},
                                         {DNNL_ARG_TO, memory(operand.plain, to)}});
}

Product::Way& Product::way(const Operand& operand) {
  const std::pair<int, bool> key(operand.argument, operand.plain.format_desc.blocking.inner_nblks > 0);
  const auto found = ways_.find(key);
  if (found != ways_.end()) return found->second;
  Way way;
  way.inside = onednn::query_layout(&description_, dnnl_query_exec_arg_md, operand.argument);
  way.same = !operand.images && !std::memcmp(&operand.plain, &way.inside, sizeof way.inside);
  const int64_t block = way.same || operand.images ? 0 : channels_of_block(way.inside, operand.plain);
  if (operand.images) {
    way.matrices = operand.images;
    way.channels = operand.plain.dims[1];
    way.places = operand.plain.dims[0] / operand.images;
  } else if (block) {
    way.channels = block;
    way.places = operand.plain.format_desc.blocking.strides[1];
    way.matrices = size(operand.array) / (block * way.places);
  } else if (!way.same) {
    way.reorder = operand.write == kNothing ? reorder(operand.plain, way.inside)
                                            : reorder(way.inside, operand.plain);
  }
  return ways_[key] = way;
}

namespace {

void add(const void* made, const TBlob& to) {
  if (is_float(to)) return kernels->binary_floats(kSum, floats(to), static_cast<const float*>(made),
                                                  floats(to), size(to), kStore);
  const auto* const from = static_cast<const Half*>(made);
  bfloat16_kernels->sum(&from, 1, halves(to), size(to), kAdd);
}

}  // namespace

void Product::run(const std::vector<Operand>& operands, Inside* read) {
  Lease lease;
  onednn::Arguments arguments;
  std::map<int, void*> inside;
  const auto lies_on_read = [&](const Operand& made) {  // shares memory with an input that is not reordered
    return std::any_of(operands.begin(), operands.end(), [&](const Operand& read) {
      return read.write == kNothing && way(read).same && overlap(read.array, made.array);
    });
  };
  for (const Operand& operand : operands) {
    const Way& way = this->way(operand);
    void* at = operand.array.dptr_;
    if (operand.write == kNothing && !way.same) {
      at = read->enter(operand, way);
    } else if (operand.write != kNothing && (!way.same || operand.write == kAdd || lies_on_read(operand))) {
      at = lease.memory(room_for(way.inside));
    }
    inside[operand.argument] = at;
    arguments[operand.argument] = memory(way.inside, at);
  }
  onednn::execute(&primitive_, stream(), arguments);
  for (const Operand& operand : operands) {
    const Way& way = this->way(operand);
    const void* made = inside[operand.argument];
    if (operand.write == kNothing || made == operand.array.dptr_) continue;
    const int64_t n = size(operand.array);
    if (way.same && operand.write == kStore) {
      kernels->copy(made, operand.array.dptr_, n * mshadow::mshadow_sizeof(operand.array.type_flag_));
    } else if (!way.same) {
      void* const plain = operand.write == kAdd ? lease.memory(room_for(n, operand.plain))
                                                : operand.array.dptr_;
      way.leave(operand, inside[operand.argument], plain);
      made = plain;
    }
    if (operand.write == kAdd) add(made, operand.array);
  }
}

// ---- layers ----------------------------------------------------------------------

namespace {

std::string key_of(const char* name, int pass, std::initializer_list<const Sizes*> all) {
  std::string key = name + std::to_string(pass);
  for (const Sizes* sizes : all) {
    key += '|';
    for (int64_t size : *sizes) key += std::to_string(size) + ',';
  }
  return key;
}

Sizes sizes_of(const TBlob& array) { return Sizes(array.shape_.begin(), array.shape_.end()); }

dnnl_memory_desc_t any(const Sizes& dims, int type = dnnl_bf16) {
  return layout(dims, dnnl_format_tag_any, type);
}
dnnl_memory_desc_t plain(const Sizes& dims, int type = dnnl_bf16) {
  return layout(dims, kPlain[dims.size()], type);
}

// A convolution of any pass; `bias`: null, or its size; `parameters`: the type of their arrays; `data`: the type of
// the gradient of x.
struct Convolution {
  Sizes x, w, y, stride, dilate, pad;
  const Sizes* bias;
  int parameters = dnnl_bf16, data = dnnl_bf16;

  dnnl_convolution_desc_t operation(int pass) const {
    dnnl_convolution_desc_t made;
    std::memset(&made, 0, sizeof made);
    made.primitive_kind = dnnl_convolution;
    made.prop_kind = static_cast<dnnl_prop_kind_t>(pass);
    made.alg_kind = dnnl_convolution_direct;
    made.accum_data_type = dnnl_f32;
    if (pass == kBackwardData) made.diff_src_desc = any(x, data);
    else made.src_desc = any(x);
    (pass == kForward ? made.dst_desc : made.diff_dst_desc) = any(y);
    if (pass == kBackwardWeights) made.diff_weights_desc = any(w, parameters);
    else made.weights_desc = any(w);
    if (bias && pass != kBackwardData)
      (pass == kBackwardWeights ? made.diff_bias_desc : made.bias_desc) = plain(*bias, parameters);
    const size_t spatial = x.size() - 2;
    for (size_t i = 0; i < spatial; ++i) {
      const int64_t reach = (w[w.size() - spatial + i] - 1) * dilate[i] + 1;
      made.strides[i] = stride[i];
      made.dilates[i] = dilate[i] - 1;
      made.padding[0][i] = pad[i];
      made.padding[1][i] = (y[2 + i] - 1) * stride[i] + reach - x[2 + i] - pad[i];
    }
    return made;
  }

  // Whether an element of the weight reads padding alone. oneDNN leaves its gradient uninitialized, for example
  // of a 3x3 weight on images of 1x1 with a stride of 2.
  bool has_idle_weights() const {
    const size_t spatial = x.size() - 2;
    for (size_t i = 0; i < spatial; ++i)
      for (int64_t k = 0; k < w[w.size() - spatial + i]; ++k) {
        bool reads = false;
        for (int64_t to = 0; to < y[2 + i] && !reads; ++to) {
          const int64_t at = to * stride[i] - pad[i] + k * dilate[i];
          reads = at >= 0 && at < x[2 + i];
        }
        if (!reads) return true;
      }
    return false;
  }

  bool has_wrong_depth() const {
    return x.size() == 5 && Depth{x[2], y[2], w[w.size() - 3], stride[0], dilate[0], pad[0]}.is_wrong();
  }

  std::shared_ptr<Product> product(int pass) const {
    if (pass == kBackwardWeights && (has_idle_weights() || has_wrong_depth())) return nullptr;
    const Sizes none, types{parameters, data};
    return Product::find(
        key_of("convolution", pass, {&x, &w, &y, &stride, &dilate, &pad, bias ? bias : &none, &types}), [&] {
          const auto forward = operation(kForward);
          onednn::Description hint = describe(&forward);
          if (pass == kForward || !hint.get()) return hint;
          const auto its = operation(pass);
          return describe(&its, &hint);
        });
  }
};

// A dense layer: rows of x, of w, and of y; `images`: the images of which x and y are rows (see Operand), or 0.
struct Dense {
  Sizes x, w, y;
  const Sizes* bias;
  int64_t images = 0;
  int parameters = dnnl_bf16, result = dnnl_bf16;  // types of arrays: of parameters, and of y or the gradient of x

  dnnl_inner_product_desc_t operation(int pass) const {
    dnnl_inner_product_desc_t made;
    std::memset(&made, 0, sizeof made);
    made.primitive_kind = dnnl_inner_product;
    made.prop_kind = static_cast<dnnl_prop_kind_t>(pass);
    made.accum_data_type = dnnl_f32;
    const auto data = [&](const Sizes& dims, bool is_result) {
      const int type = is_result ? result : int(dnnl_bf16);
      return images ? plain(dims, type) : any(dims, type);
    };
    (pass == kBackwardData ? made.diff_src_desc : made.src_desc) = data(x, pass == kBackwardData);
    (pass == kForward ? made.dst_desc : made.diff_dst_desc) = data(y, pass == kForward);
    if (pass == kBackwardWeights) made.diff_weights_desc = any(w, parameters);
    else made.weights_desc = any(w);
    if (bias && pass != kBackwardData)
      (pass == kBackwardWeights ? made.diff_bias_desc : made.bias_desc) = plain(*bias, parameters);
    return made;
  }

  std::shared_ptr<Product> product(int pass) const {
    const Sizes none, its{images, parameters, result};
    return Product::find(key_of("dense", pass, {&x, &w, &y, bias ? bias : &none, &its}), [&] {
      const auto forward = operation(kForward);
      onednn::Description hint = describe(&forward);
      if (pass == kForward || !hint.get()) return hint;
      const auto its = operation(pass);
      return describe(&its, &hint);
    });
  }
};

// ---- a convolution as a dense layer of gathered windows (im2col)
//
// With AMX oneDNN's convolutions are up to 20 times slower for small images with many channels, and weight gradients
// of 1x1 kernels are 3 times slower.

Dense rows_of(const Convolution& layer) {
  const int64_t rows = layer.y[0] * layer.y[2] * layer.y[3], read = layer.w[1] * layer.w[2] * layer.w[3];
  return {{rows, read}, {layer.w[0], read}, {rows, layer.w[0]}, layer.bias, layer.x[0], layer.parameters};
}

bool is_pointwise(const Convolution& layer) {
  return layer.w[2] * layer.w[3] * layer.stride[0] * layer.stride[1] == 1 && !layer.pad[0] && !layer.pad[1];
}

bool pays_by_rows(const Convolution& layer, int pass) {
  if (instructions() != Instructions::kAmx || layer.x.size() != 4 || layer.w.size() != 4) return false;
  const int64_t kernel = layer.w[2] * layer.w[3], rows = rows_of(layer).x[0], outputs = layer.w[0];
  if (pass == kForward) return kernel > 1 && 4 * rows <= outputs;
  return pass == kBackwardWeights && (kernel == 1 || rows <= 2 * outputs);
}

// For each image, a matrix with a row for each channel and position of the kernel, and a column for each position
// of y.
void unfold(const Convolution& layer, const Half* x, Half* to) {
  const int64_t high = layer.x[2], wide = layer.x[3], y_high = layer.y[2], y_wide = layer.y[3];
  const int64_t planes = layer.x[0] * layer.x[1], kernel = layer.w[2] * layer.w[3];
  for_all(planes, planes * kernel * y_high * y_wide, [&](int64_t plane) {
    const Half* const from = x + plane * high * wide;
    Half* made = to + plane * kernel * y_high * y_wide;
    for (int64_t i = 0; i < layer.w[2]; ++i)
      for (int64_t j = 0; j < layer.w[3]; ++j)
        for (int64_t row = 0; row < y_high; ++row, made += y_wide) {
          const int64_t at_row = row * layer.stride[0] + i * layer.dilate[0] - layer.pad[0];
          for (int64_t column = 0; column < y_wide; ++column) {
            const int64_t at = column * layer.stride[1] + j * layer.dilate[1] - layer.pad[1];
            const bool inside = at_row >= 0 && at_row < high && at >= 0 && at < wide;
            made[column] = inside ? from[at_row * wide + at] : Half(0);
          }
        }
  });
}

// A convolution's pass as a dense layer.
struct ByRows {
  Dense layer;
  TBlob x;
};

Operand operand(int argument, const TBlob& array, const Sizes& dims, Write write = kNothing,
                int64_t images = 0) {
  return {argument, array, plain(dims, type_in_memory(array)), write, images};
}

// `blocked`: whether the array's channels are in blocks.
Operand operand(int argument, const TBlob& array, const Sizes& dims, bool blocked, Write write,
                int64_t images = 0) {
  Operand made = operand(argument, array, dims, write, images);
  if (blocked) made.plain = layout(dims, kInBlocks[dims.size()], type_in_memory(array));
  return made;
}

// Runs a layer's passes: forward from x, weight and bias; backward from the gradient of y, x, weight and
// bias to those of x, weight and bias. `rows`: null, or for the forward pass, or for the weight's gradient.
template <class Layer>
bool run_layer(const Call& call, bool backward, const Layer& layer, const ByRows* rows) {
  if (!backward) {
    if (call.write(0) == kNothing) return true;
    const auto run = [&](const auto& of, const TBlob& x, int64_t images) {
      const auto product = of.product(kForward);
      if (!product) return false;
      std::vector<Operand> all{
          operand(DNNL_ARG_SRC, x, of.x, call.blocked.input(0), kNothing, images),
          operand(DNNL_ARG_WEIGHTS, call.in[1], of.w),
          operand(DNNL_ARG_DST, call.out[0], of.y, call.blocked.output(0), call.write(0), images)};
      if (of.bias) all.push_back(operand(DNNL_ARG_BIAS, call.in[2], *of.bias));
      product->run(all);
      return true;
    };
    return (rows && run(rows->layer, rows->x, rows->layer.images)) || run(layer, call.in[0], 0);
  }
  const TBlob &dy = call.in[0], &x = call.in[1], &w = call.in[2];
  const bool wants_bias = layer.bias && call.write(2) != kNothing;
  const bool wants_weight = call.write(1) != kNothing || wants_bias;
  const auto data = call.write(0) != kNothing ? layer.product(kBackwardData) : nullptr;
  if (call.write(0) != kNothing && !data) return false;
  Product::Inside read;
  const auto run_weight = [&](auto of, const TBlob& x, int64_t images) {
    if (!wants_bias) of.bias = nullptr;
    const auto product = of.product(kBackwardWeights);
    if (!product) return false;
    Lease lease;
    TBlob dw = call.out[1];
    const bool unread = call.write(1) == kNothing;
    if (unread) dw.dptr_ = lease.memory(size(dw));
    std::vector<Operand> all{operand(DNNL_ARG_SRC, x, of.x, call.blocked.input(1), kNothing, images),
                             operand(DNNL_ARG_DIFF_DST, dy, of.y, call.blocked.input(0), kNothing, images),
                             operand(DNNL_ARG_DIFF_WEIGHTS, dw, of.w, unread ? kStore : call.write(1))};
    if (wants_bias) all.push_back(operand(DNNL_ARG_DIFF_BIAS, call.out[2], *of.bias, call.write(2)));
    product->run(all, &read);
    return true;
  };
  // the weight first, because the gradient of x may share memory with that of y
  if (wants_weight && !(rows && run_weight(rows->layer, rows->x, rows->layer.images)) &&
      !run_weight(layer, x, 0))
    return false;
  if (data)
    data->run({operand(DNNL_ARG_WEIGHTS, w, layer.w),
               operand(DNNL_ARG_DIFF_DST, dy, layer.y, call.blocked.input(0), kNothing),
               operand(DNNL_ARG_DIFF_SRC, call.out[0], layer.x, call.blocked.output(0), call.write(0))}, &read);
  return true;
}

}  // namespace

namespace {

// Whether all arrays of a layer's call are bfloat16; parameters and their gradients may be float32.
bool multiplies_layer(const Call& call, const TBlob& weight) {
  return multiplies(call.out[0].type_flag_) && call.in[0].type_flag_ == mshadow::kBfloat16 &&
         (is_float(weight) || all_half(call));
}

}  // namespace

namespace {

// The convolution of a call, from x to y; of a deconvolution from its result to its data.
Convolution layer_of(const Call& call, const TBlob& x, const TBlob& w, const TBlob& y, const Sizes* bias) {
  const size_t spatial = x.ndim() - 2;
  const auto said = [&](const char* key, int64_t otherwise) {
    const Sizes given = numbers(call.attrs, key);
    return given.size() == spatial ? given : Sizes(spatial, otherwise);
  };
  const auto groups = static_cast<int64_t>(number(call.attrs, "num_group", 1));
  Sizes weight = sizes_of(w);
  if (groups > 1) {
    weight[0] /= groups;
    weight.insert(weight.begin(), groups);
  }
  return {sizes_of(x), weight, sizes_of(y), said("stride", 1), said("dilate", 1), said("pad", 0), bias,
          type_in_memory(w)};
}

bool multiplies_images(const Call& call, const TBlob& x, const TBlob& w, const TBlob& y) {
  return multiplies_layer(call, w) && x.ndim() >= 3 && x.ndim() <= 5 && size(x) > 0 && size(y) > 0;
}

}  // namespace

bool onednn_convolution(const Call& call, bool backward) {
  const TBlob &x = call.in[backward ? 1 : 0], &w = call.in[backward ? 2 : 1];
  const TBlob& y = backward ? call.in[0] : call.out[0];
  if (!multiplies_images(call, x, w, y)) return false;
  const bool has_bias = (backward ? call.out : call.in).size() > 2;
  const Sizes bias{y.shape_[1]};
  const Convolution layer = layer_of(call, x, w, y, has_bias ? &bias : nullptr);
  const std::lock_guard<std::mutex> mine(turn());
  if (!pays_by_rows(layer, backward ? kBackwardWeights : kForward))
    return run_layer(call, backward, layer, nullptr);
  if (call.blocked.any()) return false;
  Lease lease;
  ByRows rows{rows_of(layer), x};
  if (!is_pointwise(layer)) {
    rows.x.dptr_ = lease.memory((rows.layer.x[0] * rows.layer.x[1] + 1) / 2);
    unfold(layer, halves(x), halves(rows.x));
  }
  return run_layer(call, backward, layer, &rows);
}

// A deconvolution is the backward pass of a convolution from its result to its data.
bool onednn_deconvolution(const Call& call, bool backward) {
  const TBlob &x = call.in[backward ? 1 : 0], &w = call.in[backward ? 2 : 1];
  const TBlob& y = backward ? call.in[0] : call.out[0];
  if (!multiplies_images(call, x, w, y) || !all_half(call) || !numbers(call.attrs, "target_shape").empty())
    return false;
  const bool has_bias = (backward ? call.out : call.in).size() > 2;
  const int64_t channels = y.shape_[1], images = y.shape_[0], places = size(y) / (images * channels);
  Convolution layer = layer_of(call, y, w, x, nullptr);
  const std::lock_guard<std::mutex> mine(turn());
  Lease lease;
  if (!backward) {
    if (call.write(0) == kNothing) return true;
    if (has_bias) layer.data = dnnl_f32;
    const auto product = layer.product(kBackwardData);
    if (!product) return false;
    const NDArray sums = has_bias ? lease.array(y.shape_) : NDArray();
    const TBlob& to = has_bias ? sums.data() : y;
    const bool blocked = call.blocked.output(0);
    product->run({operand(DNNL_ARG_DIFF_DST, x, layer.y, call.blocked.input(0), kNothing),
                  operand(DNNL_ARG_WEIGHTS, w, layer.w),
                  operand(DNNL_ARG_DIFF_SRC, to, layer.x, blocked, has_bias ? kStore : call.write(0))});
    if (!has_bias) return true;
    std::vector<float> bias(channels);
    kernels_of(w)->widen(halves(call.in[2]), bias.data(), channels);
    const int64_t together = blocked ? kBlock : 1;  // adjacent channels
    for_all(images * channels / together, size(y), [&](int64_t i) {
      float* const row = floats(to) + i * places * together;
      const float* const added = &bias[i * together % channels];
      for (int64_t k = 0; k < places * together; ++k) row[k] += added[k % together];
    });
    narrow(floats(to), y, call.write(0));
    return true;
  }
  const auto data = call.write(0) != kNothing ? layer.product(kForward) : nullptr;
  const auto weight = call.write(1) != kNothing ? layer.product(kBackwardWeights) : nullptr;
  if ((call.write(0) != kNothing && !data) || (call.write(1) != kNothing && !weight)) return false;
  if (has_bias && call.write(2) != kNothing) {
    const NDArray sums = lease.array(call.out[2].shape_);
    const Half* gradients = halves(y);
    if (call.blocked.input(0)) {
      Half* const plain = reinterpret_cast<Half*>(lease.memory((size(y) + 1) / 2));
      unblock(y, plain);
      gradients = plain;
    }
    for_all(channels, size(y), [&](int64_t channel) {
      std::vector<float> row(places);
      double sum = 0;
      for (int64_t image = 0; image < images; ++image) {
        kernels_of(y)->widen(gradients + (image * channels + channel) * places, row.data(), places);
        sum = std::accumulate(row.begin(), row.end(), sum);
      }
      floats(sums.data())[channel] = static_cast<float>(sum);
    });
    narrow(sums, call.out[2], call.write(2));
  }
  Product::Inside read;
  // first the weight: the gradient of x may lie on that of y
  if (weight)
    weight->run({operand(DNNL_ARG_SRC, y, layer.x, call.blocked.input(0), kNothing),
                 operand(DNNL_ARG_DIFF_DST, x, layer.y, call.blocked.input(1), kNothing),
                 operand(DNNL_ARG_DIFF_WEIGHTS, call.out[1], layer.w, call.write(1))}, &read);
  if (data)
    data->run({operand(DNNL_ARG_SRC, y, layer.x, call.blocked.input(0), kNothing),
               operand(DNNL_ARG_WEIGHTS, w, layer.w),
               operand(DNNL_ARG_DST, call.out[0], layer.y, call.blocked.output(0), call.write(0))}, &read);
  return true;
}

bool onednn_dense(const Call& call, bool backward) {
  const TBlob &x = call.in[backward ? 1 : 0], &w = call.in[backward ? 2 : 1];
  if (!multiplies_layer(call, w) || size(x) == 0 || size(w) == 0) return false;
  const int64_t high = w.shape_[0], wide = w.shape_[1], rows = size(x) / wide;
  const bool has_bias = (backward ? call.out : call.in).size() > 2;
  const Sizes bias{high};
  const std::lock_guard<std::mutex> mine(turn());
  return run_layer(call, backward, Dense{{rows, wide}, {high, wide}, {rows, high},
                                         has_bias ? &bias : nullptr, 0, type_in_memory(w)}, nullptr);
}

bool onednn_rows(DensePass of, int64_t rows, int64_t outputs, int64_t inputs, const Half* a, const Half* b,
                 float* to, Product::Inside* read) {
  if (instructions() == Instructions::kNone) return false;
  const Dense layer{{rows, inputs}, {outputs, inputs}, {rows, outputs}, nullptr, 0,
                    of == DensePass::kWeight ? dnnl_f32 : dnnl_bf16, dnnl_f32};
  const int pass = of == DensePass::kForward ? kForward : of == DensePass::kData ? kBackwardData
                                                                                 : kBackwardWeights;
  const auto product = layer.product(pass);
  if (!product) return false;
  const auto array = [](const void* numbers, const Sizes& dims, int type) {
    return TBlob(const_cast<void*>(numbers), mxnet::TShape({dims[0], dims[1]}), mshadow::cpu::kDevMask, type, 0);
  };
  const Sizes& made = pass == kForward ? layer.y : pass == kBackwardData ? layer.x : layer.w;
  const Sizes& first = pass == kForward ? layer.x : layer.y;
  const Sizes& second = pass == kBackwardWeights ? layer.x : layer.w;
  const TBlob to_array = array(to, made, mshadow::kFloat32), a_array = array(a, first, mshadow::kBfloat16),
              b_array = array(b, second, mshadow::kBfloat16);
  const int to_is[] = {DNNL_ARG_DST, DNNL_ARG_DIFF_SRC, DNNL_ARG_DIFF_WEIGHTS};
  product->run({{pass == kForward ? DNNL_ARG_SRC : DNNL_ARG_DIFF_DST, a_array, plain(first)},
                {pass == kBackwardWeights ? DNNL_ARG_SRC : DNNL_ARG_WEIGHTS, b_array, plain(second)},
                {to_is[static_cast<int>(of)], to_array, plain(made, dnnl_f32), kStore}}, read);
  return true;
}

// ---- products of matrices ----------------------------------------------------------

namespace {

// A matrix, or a batch of them; `turned`: whether it is transposed.
struct Matrix {
  const TBlob& array;
  bool turned;

  Sizes dims() const {
    Sizes made = sizes_of(array);
    if (turned) std::swap(made[made.size() - 1], made[made.size() - 2]);
    return made;
  }
  dnnl_memory_desc_t layout() const {
    if (!turned) return plain(dims());
    return gluon_amp::layout(dims(), dims().size() == 2 ? dnnl_ba : dnnl_acb);
  }
};

// to = a * b. Null if oneDNN has no primitive for it.
struct Multiplication {
  Matrix a, b;
  const TBlob& to;
  Write write;

  std::shared_ptr<Product> product() const;
  void run(Product& product) const {
    if (write == kNothing) return;
    const std::lock_guard<std::mutex> mine(turn());
    product.run({{DNNL_ARG_SRC, a.array, a.layout()}, {DNNL_ARG_WEIGHTS, b.array, b.layout()},
                 {DNNL_ARG_DST, to, Matrix{to, false}.layout(), write}});
  }
};

std::shared_ptr<Product> Multiplication::product() const {
  const Sizes first = a.dims(), second = b.dims(), turned{a.turned, b.turned};
  return Product::find(key_of("matmul", 0, {&first, &second, &turned}), [&] {
    dnnl_matmul_desc_t operation;
    std::memset(&operation, 0, sizeof operation);
    operation.primitive_kind = dnnl_matmul;
    operation.src_desc = a.layout();
    operation.weights_desc = b.layout();
    operation.dst_desc = Matrix{to, false}.layout();
    operation.accum_data_type = dnnl_f32;
    return describe(&operation);
  });
}

// Whether all arrays have this number of axes, and no output shares memory with an input.
bool are_matrices(const Call& call, int axes) {
  const auto is_one = [axes](const TBlob& array) { return array.ndim() == axes && size(array) > 0; };
  for (const TBlob& from : call.in)
    for (const TBlob& to : call.out)
      if (overlap(from, to)) return false;
  return all_half(call) && multiplies(call.out[0].type_flag_) && std::all_of(call.in.begin(), call.in.end(), is_one) &&
         std::all_of(call.out.begin(), call.out.end(), is_one);
}

bool product_of(const Call& call, int axes) {
  if (!are_matrices(call, axes)) return false;
  const Multiplication made{{call.in[0], flag(call.attrs, "transpose_a", false)},
                            {call.in[1], flag(call.attrs, "transpose_b", false)}, call.out[0],
                            call.write(0)};
  const auto product = made.product();
  if (product) made.run(*product);
  return product != nullptr;
}

bool dot(const Call& call) { return product_of(call, 2); }

bool dot_gradient(const Call& call) {  // gradient, a, b
  if (!are_matrices(call, 2)) return false;
  const bool a = flag(call.attrs, "transpose_a", false), b = flag(call.attrs, "transpose_b", false);
  const Matrix g{call.in[0], false}, turned{call.in[0], true}, second{call.in[2], b != !a},
      first{call.in[1], a != !b};
  const Multiplication da{a ? second : g, a ? turned : second, call.out[0], call.write(0)};
  const Multiplication db{b ? turned : first, b ? first : g, call.out[1], call.write(1)};
  const auto of_a = da.product(), of_b = db.product();
  if (!of_a || !of_b) return false;
  da.run(*of_a);
  db.run(*of_b);
  return true;
}

}  // namespace

bool keeps_blocks() { return instructions() == Instructions::kBfloat16; }

bool onednn_batch_dot(const Call& call) { return product_of(call, 3); }

void add_products(Rows& rows) {
  instructions();  // requests AMX before any operator of MXNet runs
  rows.insert({{"dot", {dot, kAnyPlace}}, {"_backward_dot", {dot_gradient, kAnyPlace}}});
}

}  // namespace gluon_amp

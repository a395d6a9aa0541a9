// Primitives choose their layouts. Arrays are plain, or in oneDNN's own (layout.h), and are reordered where a
// primitive has another layout.
#include "onednn/product.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "dispatch/watch.h"

namespace gluon_amp {
namespace {

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

const onednn::Engine& engine() { return *static_cast<const onednn::Engine*>(onednn::cpu_engine()); }

const onednn::Stream& stream() {
  static const onednn::Stream* const instance = [] {
    auto* stream = new onednn::Stream;
    onednn::make_stream(stream, engine(), dnnl_stream_default_flags);
    return stream;
  }();
  return *instance;
}

onednn::Memory memory(const dnnl_memory_desc_t& layout, void* at) {
  onednn::Memory result;
  onednn::make_memory(&result, layout, engine(), at);
  return result;
}

onednn::Primitive primitive(const onednn::Handle& description) {
  onednn::Primitive result;
  try {
    onednn::make_primitive(&result, description.get());
  } catch (const mkldnn::error& error) {
    CHECK_NE(error.status, mkldnn_out_of_memory) << "oneDNN failed to allocate memory: " << error.what();
    throw;
  }
  return result;
}

onednn::Primitive reorder(const dnnl_memory_desc_t& from, const dnnl_memory_desc_t& to) {
  static const onednn::Attributes* const none = [] {
    auto* attributes = new onednn::Attributes;
    onednn::make_attributes(attributes);
    return attributes;
  }();
  onednn::ReorderDescription description;
  onednn::make_reorder(&description, memory(from, nullptr), memory(to, nullptr), *none, false);
  return primitive(description);
}

// The memory of a layout, in floats.
int64_t room_for(const dnnl_memory_desc_t& layout) {
  int64_t n = 1;
  for (int i = 0; i < layout.ndims; ++i) n *= layout.padded_dims[i];
  return layout.data_type == dnnl_bf16 ? (n + 1) / 2 : n;
}

}  // namespace

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

bool multiplies(int type) {
  return type == mshadow::kBfloat16 && instructions() != Instructions::kNone && !watching() && !generic_only;
}

Sizes sizes_of(const TBlob& array) { return Sizes(array.shape_.begin(), array.shape_.end()); }

std::string key_of(const char* name, int pass, std::initializer_list<const Sizes*> all) {
  std::string key = name + std::to_string(pass);
  for (const Sizes* sizes : all) {
    key += '|';
    for (int64_t size : *sizes) key += std::to_string(size) + ',';
  }
  return key;
}

dnnl_memory_desc_t any_layout(const Sizes& dims, int type) { return layout(dims, dnnl_format_tag_any, type); }

dnnl_memory_desc_t plain_layout(const Sizes& dims, int type) {
  constexpr dnnl_format_tag_t kPlain[] = {dnnl_format_tag_undef, dnnl_a, dnnl_ab, dnnl_abc, dnnl_abcd,
                                          dnnl_abcde, dnnl_abcdef};
  return layout(dims, kPlain[dims.size()], type);
}

dnnl_memory_desc_t layout(const Sizes& dims, int tag, int type) {
  dnnl_memory_desc_t layout;
  std::memset(&layout, 0, sizeof layout);
  onednn::make_layout(&layout, dims, type, tag, false);
  return layout;
}

onednn::Description describe(const void* operation, const onednn::Description* hint) {
  onednn::Description result;
  onednn::make_description(&result, operation, nullptr, engine(), hint ? hint->get() : nullptr, true);
  return result;
}

Product::Product(onednn::Description description)
    : description_(std::move(description)), primitive_(primitive(description_)) {}

std::shared_ptr<Product> Product::find(const std::string& key, const Make& make) {
  static std::mutex lock;
  static auto& products = *new std::map<std::string, std::shared_ptr<Product>>;
  constexpr size_t kMost = 1000;
  const std::lock_guard<std::mutex> guard(lock);
  const auto entry = products.find(key);
  if (entry != products.end()) return entry->second;
  if (products.size() >= kMost) products.clear();
  onednn::Description description = make();
  auto& product = products[key];
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
  void* const reordered = scratch_.memory(room_for(way.inside));
  way.enter(operand, reordered);
  held_.push_back({operand.array.dptr_, way, reordered});
  return reordered;
}

namespace {

// The number of adjacent channels if `inside` is channels-last images or oneDNN's layout without padding; else 0.
int64_t channels_together(const dnnl_memory_desc_t& inside, const dnnl_memory_desc_t& plain) {
  const int axes = inside.ndims;
  const auto &in = inside.format_desc.blocking, &out = plain.format_desc.blocking;
  if (inside.data_type != dnnl_bf16 || plain.data_type != dnnl_bf16 || axes < 3 ||
      inside.format_kind != dnnl_blocked || inside.offset0 || in.inner_nblks > 1 || out.inner_nblks)
    return 0;
  const int64_t channels = inside.dims[1];
  const int64_t together = in.inner_nblks ? in.inner_blks[0] : channels;
  if ((in.inner_nblks && in.inner_idxs[0] != 1) || channels % together) return 0;
  int64_t step = together;  // the stride of positions
  for (int k = axes; k-- > 2; step *= inside.dims[k])
    if (in.strides[k] != step || out.strides[k] * together != step) return 0;
  if (in.inner_nblks ? in.strides[1] != step : in.strides[1] != 1) return 0;
  return in.strides[0] == step * (channels / together) && out.strides[1] * together == step &&
                 out.strides[0] == in.strides[0]
             ? together : 0;
}

}  // namespace

void Product::Way::enter(const Operand& operand, void* to) const {
  if (matrices)
    kernels->transpose(numbers16(operand.array), static_cast<Number16*>(to), matrices, channels, places);
  else
    onednn::execute(&reorder, stream(), {{DNNL_ARG_FROM, memory(operand.plain, operand.array.dptr_)},
                                         {DNNL_ARG_TO, memory(inside, to)}});
}

void Product::Way::leave(const Operand& operand, void* from, void* to) const {
  if (matrices)
    kernels->transpose(static_cast<Number16*>(from), static_cast<Number16*>(to), matrices, places, channels);
  else
    onednn::execute(&reorder, stream(), {{DNNL_ARG_FROM, memory(inside, from)},
                                         {DNNL_ARG_TO, memory(operand.plain, to)}});
}

Product::Way& Product::way(const Operand& operand) {
  const std::pair<int, bool> key(operand.argument, operand.plain.format_desc.blocking.inner_nblks > 0);
  const auto entry = ways_.find(key);
  if (entry != ways_.end()) return entry->second;
  Way way;
  way.inside = onednn::query_layout(&description_, dnnl_query_exec_arg_md, operand.argument);
  way.same = !operand.images && !std::memcmp(&operand.plain, &way.inside, sizeof way.inside);
  const int64_t together = way.same || operand.images ? 0 : channels_together(way.inside, operand.plain);
  if (operand.images) {
    way.matrices = operand.images;
    way.channels = operand.plain.dims[1];
    way.places = operand.plain.dims[0] / operand.images;
  } else if (together) {
    way.channels = together;
    way.places = operand.plain.format_desc.blocking.strides[1];
    way.matrices = size(operand.array) / (together * way.places);
  } else if (!way.same) {
    way.reorder = operand.write == kNothing ? reorder(operand.plain, way.inside)
                                            : reorder(way.inside, operand.plain);
  }
  return ways_[key] = way;
}

void Product::run(const std::vector<Operand>& operands, Inside* read) {
  Scratch scratch;
  onednn::Arguments arguments;
  std::map<int, void*> inside;
  const auto lies_on_read = [&](const Operand& written) {  // shares memory with an input that is not reordered
    return std::any_of(operands.begin(), operands.end(), [&](const Operand& read) {
      return read.write == kNothing && way(read).same && overlap(read.array, written.array);
    });
  };
  for (const Operand& operand : operands) {
    const Way& way = this->way(operand);
    void* at = operand.array.dptr_;
    if (operand.write == kNothing && !way.same) {
      at = read->enter(operand, way);
    } else if (operand.write != kNothing && (!way.same || operand.write == kAdd || lies_on_read(operand))) {
      at = scratch.memory(room_for(way.inside));
    }
    inside[operand.argument] = at;
    arguments[operand.argument] = memory(way.inside, at);
  }
  onednn::execute(&primitive_, stream(), arguments);
  for (const Operand& operand : operands) {
    const Way& way = this->way(operand);
    const void* numbers = inside[operand.argument];
    if (operand.write == kNothing || numbers == operand.array.dptr_) continue;
    if (!way.same) {
      void* const plain = operand.write == kAdd ? scratch.like(operand.array).dptr_ : operand.array.dptr_;
      way.leave(operand, inside[operand.argument], plain);
      numbers = plain;
    }
    if (numbers != operand.array.dptr_) put(numbers, operand.array, operand.write);
  }
}

}  // namespace gluon_amp

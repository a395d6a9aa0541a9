// mshadow's kernels: evaluate an expression, described by template arguments, for each element.
//
// A kernel receives a Plan of the expression by value, with the usual struct layout. The parser below maps template
// arguments to its members.
#include <stdlib.h>
#include <string.h>

#include <memory>

#include "compute.h"

namespace {

struct Plan {
  virtual ~Plan() = default;
  virtual double eval(ll y, ll x) const = 0;
  virtual void save(ll, ll, const std::string&, double) const { unknown("plan to save into"); }
};
using Made = std::unique_ptr<Plan>;

// A struct's members: `at` is aligned for each member, and the size is a multiple of the struct's alignment.
struct Members {
  const char* data;
  size_t at = 0;
  size_t alignment = 1;
  template <class T> T next() {
    align(sizeof(T));
    T made;
    memcpy(&made, data + at, sizeof made);
    at += sizeof made;
    return made;
  }
  void align(size_t to) {
    alignment = std::max(alignment, to);
    at = (at + to - 1) / to * to;
  }
};

double round_to(Type type, double value) { return Array{type, nullptr}.rounded(value); }

double saved(const std::string& how, Type type, double old, double value) {
  value = round_to(type, value);
  return how == "saveto" ? value : how == "plusto" ? old + value : how == "minusto" ? old - value
      : how == "multo" ? old * value : how == "divto" ? old / value : (unknown("saver " + how), 0);
}

double reduced(const std::string& reducer, double total, double value) {
  return reducer == "sum" ? total + value : reducer == "maximum" ? std::max(total, value)
      : reducer == "minimum" ? std::min(total, value) : (unknown("reducer " + reducer), 0);
}
double first(const std::string& reducer) {
  return reducer == "maximum" ? -INFINITY : reducer == "minimum" ? INFINITY : 0;
}

struct TensorPlan : Plan {
  Array array;
  ll stride;
  double eval(ll y, ll x) const override { return array[y * stride + x]; }
  void save(ll y, ll x, const std::string& how, double value) const override {
    const ll i = y * stride + x;
    array.set(i, saved(how, array.type, how == "saveto" ? 0 : array[i], value));
  }
};
struct ScalarPlan : Plan {
  double value;
  double eval(ll, ll) const override { return value; }
};
struct MapPlan : Plan {  // a function of one or two expressions, rounded to the type of the result
  Type type;
  UnaryFunction one = nullptr;
  BinaryFunction two = nullptr;
  Made a, b;
  double eval(ll y, ll x) const override {
    return round_to(type, one ? one(a->eval(y, x)) : two ? two(a->eval(y, x), b->eval(y, x)) : a->eval(y, x));
  }
};
struct ReducePlan : Plan {  // over an axis; `place`: the result's position on it
  Made source;
  std::string reducer;
  ll columns, trailing, size, last;
  bool place;
  double eval(ll y, ll x) const override {
    const ll outer = (y * columns + x) / trailing, inner = (y * columns + x) % trailing;
    double total = first(reducer);
    ll found = 0;
    for (ll k = 0; k < size; k++) {
      const ll at = (outer * size + k) * trailing + inner;
      const double next = reduced(reducer, total, source->eval(at / last, at % last));
      if (next != total && total == total) found = k;
      total = next;
    }
    return place ? (double)found : total;
  }
};
struct MovePlan : Plan {  // an expression at another position
  Made source;
  std::function<std::pair<ll, ll>(ll, ll)> place;
  double eval(ll y, ll x) const override {
    const auto at = place(y, x);
    return source->eval(at.first, at.second);
  }
  void save(ll y, ll x, const std::string& how, double value) const override {
    const auto at = place(y, x);
    source->save(at.first, at.second, how, value);
  }
};

Made expression(const Name& e, const Name& type, Members* outer);

// The Plan of an expression within a struct, aligned and padded as a struct.
Made member(const Name& e, const Name& type, Members* outer) {
  Members probe{outer->data, 0};  // finds the alignment, which does not depend on the position
  std::unique_ptr<char[]> zeros(new char[4096]());
  probe.data = zeros.get();
  expression(e, type, &probe);
  outer->align(probe.alignment);
  Members inner{outer->data + outer->at};
  Made made = expression(e, type, &inner);
  inner.align(inner.alignment);
  outer->at += inner.at;
  return made;
}

int integer(const Name& name) { return std::stoi(name.id); }

Made moved(Made source, std::function<std::pair<ll, ll>(ll, ll)> place) {
  auto made = std::make_unique<MovePlan>();
  made->source = std::move(source);
  made->place = std::move(place);
  return made;
}

Made expression(const Name& e, const Name& type, Members* m) {
  const auto arg = [&](size_t i) -> const Name& { return e.args.at(i); };
  if (e.id == "Tensor") {
    auto made = std::make_unique<TensorPlan>();
    made->array = {type_of(type), m->next<void*>()};
    made->stride = integer(arg(1)) == 1 ? 0 : m->next<int>();
    return made;
  }
  if (e.id == "ScalarExp") {
    auto made = std::make_unique<ScalarPlan>();
    const Type of = type_of(arg(0));
    uint64_t bits = 0;
    m->align(width(of));
    memcpy(&bits, m->data + m->at, width(of));
    m->at += width(of);
    made->value = Array{of, &bits}[0];
    return made;
  }
  if (e.id == "UnaryMapExp" || e.id == "BinaryMapExp" || e.id == "TypecastExp") {
    auto made = std::make_unique<MapPlan>();
    made->type = type_of(type);
    if (e.id == "TypecastExp") {
      made->a = member(arg(2), arg(1), m);
    } else if (e.id == "UnaryMapExp") {
      made->one = unary_function(arg(0).id);
      made->a = member(arg(1), type, m);
    } else {
      made->two = binary_function(arg(0).id);
      made->a = member(arg(1), type, m);
      made->b = member(arg(2), type, m);
    }
    return made;
  }
  if (e.id == "MakeTensorExp") return member(arg(0), type, m);
  if (e.id == "Broadcast1DExp") {
    Made source = member(arg(0), type, m);
    if (integer(arg(3)) == 1) return moved(std::move(source), [](ll, ll x) { return std::make_pair(0LL, x); });
    const ll stride = m->next<int>(), length = m->next<int>();
    return moved(std::move(source), [=](ll y, ll) { return std::make_pair(0LL, y / stride % length); });
  }
  if (e.id == "SliceExp") {
    Made source = member(arg(0), type, m);
    if (integer(arg(4)) == 1) {
      const ll begin = m->next<int>();
      return moved(std::move(source), [=](ll y, ll x) { return std::make_pair(y, x + begin); });
    }
    const ll height = m->next<int>(), begin = m->next<int>(), old = m->next<int>(), channels = m->next<int>();
    return moved(std::move(source), [=](ll i, ll x) {
      const ll y = i % height, c = i / height % channels + begin, b = i / height / channels;
      return std::make_pair((b * old + c) * height + y, x);
    });
  }
  if (e.id == "TransposeExExp") {
    const int dims = integer(arg(2));
    Made source = member(arg(0), type, m);
    const ll stride = m->next<int>();
    std::vector<ll> strides, shape;
    for (int d = 0; d < dims; d++) strides.push_back(m->next<int>());
    for (int d = 0; d < dims; d++) shape.push_back(m->next<int>());
    return moved(std::move(source), [=](ll i, ll j) {
      ll at = j * strides[dims - 1];
      for (int d = dims - 2; d >= 0; d--, i /= shape[d + 1]) at += i % shape[d] * strides[d];
      return std::make_pair(at / stride, at % stride);
    });
  }
  if (e.id == "SwapAxisExp") {
    Made source = member(arg(0), type, m);
    if (integer(arg(3)) == 1) unknown("expression that swaps the last axis");
    const ll ny = m->next<int>(), nz = m->next<int>(), nc = m->next<int>(), nn = m->next<int>();
    return moved(std::move(source), [=](ll i, ll x) {
      const ll y = i % ny, z = i / ny % nz, c = i / ny / nz % nc, n = i / ny / nz / nc % nn, k = i / ny / nz / nc / nn;
      return std::make_pair((((k * nz + z) * nc + c) * nn + n) * ny + y, x);
    });
  }
  if (e.id == "ReshapeExp") {
    Made source = member(arg(0), type, m);
    const ll columns = m->next<int>(), old = integer(arg(3)) == 1 ? 0 : m->next<int>();
    return moved(std::move(source), [=](ll y, ll x) {
      const ll i = y * columns + x;
      return old ? std::make_pair(i / old, i % old) : std::make_pair(0LL, i);
    });
  }
  if (e.id == "ReduceWithAxisExp") {
    auto made = std::make_unique<ReducePlan>();
    made->reducer = arg(0).id;
    made->place = arg(4).id == "true";
    made->source = member(arg(1), type, m);
    for (ll* to : {&made->columns, &made->trailing, &made->size, &made->last}) *to = m->next<int>();
    return made;
  }
  unknown("expression " + e.id);
}

Made plan(const Launch& launch, size_t i) {
  const Name& type = launch.types.at(i);  // Plan<expression, type>
  Members members{(const char*)launch.args[i]};
  return expression(type.args.at(0), type.args.at(1), &members);
}

// MapPlanKernel<SAVER, bits, ...>(destination, row length, shape, expression)
void map_plan(const Launch& launch) {
  const Made to = plan(launch, 0), from = plan(launch, 3);
  const int* shape = &launch.value<int>(2);
  const std::string& how = launch.kernel.args.at(0).id;
  for (ll y = 0; y < shape[0]; y++)
    for (ll x = 0; x < shape[1]; x++) to->save(y, x, how, from->eval(y, x));
}

// MapReduceKeepDim1Kernel<SAVER, REDUCER, ...>(destination, expression, scale, shape): over all axes but the second
void reduce_keep_dim1(const Launch& launch) {
  const Made to = plan(launch, 0), from = plan(launch, 1);
  const int* shape = &launch.value<int>(3);
  const std::string& reducer = launch.kernel.args.at(1).id;
  for (ll c = 0; c < shape[1]; c++) {
    double total = first(reducer);
    for (ll n = 0; n < shape[0]; n++)
      for (ll y = 0; y < shape[2]; y++)
        for (ll x = 0; x < shape[3]; x++)
          total = reduced(reducer, total, from->eval((n * shape[1] + c) * shape[2] + y, x));
    to->save(0, c, launch.kernel.args.at(0).id, total * launch.number(2));
  }
}
// SoftmaxKernel(destination, source, columns): a block for each row
void softmax_plan(const Launch& launch) {
  const Made to = plan(launch, 0), from = plan(launch, 1);
  const ll columns = launch.integer(2);
  for (ll y = 0; y < launch.grid[0]; y++) {
    soft_max(columns, false, [&](ll x) { return from->eval(y, x); },
             [&](ll x, double value) { to->save(y, x, "saveto", value); });
  }
}
// SoftmaxGradKernel(destination, probabilities, labels, columns, [label to ignore])
void softmax_grad_plan(const Launch& launch) {
  const Made to = plan(launch, 0), from = plan(launch, 1), labels = plan(launch, 2);
  const bool ignores = launch.types.size() > 4;
  for (ll y = 0; y < launch.grid[0]; y++) {
    const ll label = (ll)labels->eval(0, y);
    const bool ignored = ignores && label == (ll)launch.number(4);
    for (ll x = 0; x < launch.integer(3); x++)
      to->save(y, x, "saveto", ignored ? 0 : from->eval(y, x) - (x == label));
  }
}

const Family g_plans(kernels(), {
    {"MapPlanKernel", map_plan}, {"MapPlanLargeKernel", map_plan}, {"MapReduceKeepDim1Kernel", reduce_keep_dim1},
    {"SoftmaxKernel", softmax_plan}, {"SoftmaxGradKernel", softmax_grad_plan}});

}  // namespace

// Float16 convolutions by cuDNN 9's execution plans, which are built once. The functions that MXNet calls select a kernel
// at each call: a ResNet-50 of 53 convolutions then waits for its host.

#include "forward.h"

#include <stddef.h>
#include <stdint.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

typedef void *Handle, *Tensor, *Filter, *Descriptor, *Stream, *Event;
typedef const void* In;
typedef void* Out;

// A function of cuDNN 9, by forward.cc, which translates its status.
extern "C" int cudnnGetTensorNdDescriptor(Tensor, int wanted, int* type, int* count, int* dims, int* strides);

namespace {

// cuDNN's numbers.
enum { kFloat = 0, kHalf = 2 };                   // types of data
enum { kCrossCorrelation = 1, kTensorOp = 1, kNhwc = 1 };
enum { kOfHandle = 0, kOfType = 1, kInt64 = 3, kOfFloat = 4, kPointer = 6, kOfMode = 7, kOfHeuristic = 8,
       kDescriptor = 15 };                        // types of attributes
enum { kConvolution = 1, kConfiguration = 3, kHeuristic = 4, kPlan = 5, kGraph = 15, kPack = 16, kTensor = 17 };
enum { kBestFirst = 3 };                          // the heuristic's mode A
const int64_t kAlignment = 16;                    // of arrays, in bytes

// The operation of a pass, and its attributes.
struct Pass { int operation, alpha, beta, convolution, w, x, y; };
const Pass kForward{10, 700, 701, 702, 703, 704, 705}, kBackwardData{12, 706, 707, 708, 709, 710, 711},
    kBackwardFilter{11, 712, 713, 714, 715, 716, 717};

// Functions of cuDNN 9 that MXNet does not call.
struct Library {
  int (*create)(int, Descriptor*);
  int (*destroy)(Descriptor);
  int (*finalize)(Descriptor);
  int (*set)(Descriptor, int attribute, int type, int64_t count, const void*);
  int (*get)(Descriptor, int attribute, int type, int64_t wanted, int64_t* count, void*);
  int (*execute)(Handle, Descriptor plan, Descriptor pack);
  int (*filter)(Filter, int wanted, int* type, int* format, int* count, int* dims);
  int (*convolution)(Descriptor, int wanted, int* count, int* pads, int* strides, int* dilations, int* mode, int* type);
  int (*math)(Descriptor, int*);
  int (*stream)(Handle, Stream*);
  bool complete = true;

  template <class F> void find(F& function, const char* name) {
    function = (F)forward_symbol(name);
    complete &= function != nullptr;
  }
  Library() {
    find(create, "cudnnBackendCreateDescriptor");
    find(destroy, "cudnnBackendDestroyDescriptor");
    find(finalize, "cudnnBackendFinalize");
    find(set, "cudnnBackendSetAttribute");
    find(get, "cudnnBackendGetAttribute");
    find(execute, "cudnnBackendExecute");
    find(filter, "cudnnGetFilterNdDescriptor");
    find(convolution, "cudnnGetConvolutionNdDescriptor");
    find(math, "cudnnGetConvolutionMathType");
    find(stream, "cudnnGetStream");
    complete &= !setting("MXNET_ENFORCE_DETERMINISM", 0) && setting("MXNET_CUDA_ALLOW_TENSOR_CORE", 1);
  }
};

const Library& library() {
  static const Library functions;
  return functions;
}

class Part {  // a descriptor of cuDNN 9
 public:
  explicit Part(int kind) { good_ = !library().create(kind, &at_); }
  Part(const Part&) = delete;
  ~Part() {
    if (at_) library().destroy(at_);
  }
  Descriptor get() const { return at_; }
  template <class T> Part& set(int attribute, int type, const T* values, int64_t count) {
    good_ = good_ && !library().set(at_, attribute, type, count, values);
    return *this;
  }
  template <class T> Part& set(int attribute, int type, const T& value) { return set(attribute, type, &value, 1); }
  bool finalize() { return good_ = good_ && !library().finalize(at_); }

 private:
  Descriptor at_ = nullptr;
  bool good_;
};

// What a plan depends on.
struct Problem {
  const Pass* pass;
  int device;
  int64_t x[8], w[8], y[8];  // sizes, then strides
  int64_t pads[2], strides[2], dilations[2];
  bool adds;  // to the result

  std::vector<int64_t> key() const {
    std::vector<int64_t> numbers{pass->operation, device, adds};
    for (const auto& of : {x, w, y}) numbers.insert(numbers.end(), of, of + 8);
    for (const auto& of : {pads, strides, dilations}) numbers.insert(numbers.end(), of, of + 2);
    return numbers;
  }
};

bool read(Tensor from, int64_t* to) {
  int type, count, sizes[4], strides[4];
  if (cudnnGetTensorNdDescriptor(from, 4, &type, &count, sizes, strides) || type != kHalf || count != 4) return false;
  for (int i = 0; i < 4; i++) to[i] = sizes[i], to[4 + i] = strides[i];
  return true;
}

bool read_filter(Filter from, int64_t* to, bool* channels_last) {
  int type, format, count, sizes[4];
  if (library().filter(from, 4, &type, &format, &count, sizes) || type != kHalf || count != 4 || format > kNhwc)
    return false;
  *channels_last = format == kNhwc;
  const int64_t c = sizes[1], h = sizes[2], w = sizes[3];
  const int64_t last[] = {h * w * c, 1, w * c, c}, first[] = {c * h * w, h * w, w, 1};
  for (int i = 0; i < 4; i++) to[i] = sizes[i], to[4 + i] = *channels_last ? last[i] : first[i];
  return true;
}

// MXNet sets the type of math to that of the algorithm that it found to be fastest. One without Tensor Cores is slower
// than a plan for channels-last images, of which most of MobileNetV2's convolutions have one: on an H100, a step takes
// 21.9 ms by plans and 45.6 by these. It is faster in NCHW: ResNet-50 by mx.contrib.amp takes 45.0 ms, by plans 50.4.
bool read_convolution(Descriptor from, bool channels_last, Problem* to) {
  int count, pads[2], strides[2], dilations[2], mode, type, math;
  if (library().convolution(from, 2, &count, pads, strides, dilations, &mode, &type) || library().math(from, &math) ||
      count != 2 || mode != kCrossCorrelation || type != kFloat || (math != kTensorOp && !channels_last))
    return false;
  for (int i = 0; i < 2; i++) to->pads[i] = pads[i], to->strides[i] = strides[i], to->dilations[i] = dilations[i];
  return true;
}

struct Arrays { const void *x, *w, *y; };

struct Plan {
  Part plan{kPlan};
  int64_t place = 0;  // in the order of cuDNN's heuristic
  int64_t bytes = 0;  // of its workspace

  bool run(Handle handle, const Arrays& arrays) const {
    void* const work = workspace(handle, bytes);
    const void* pointers[] = {arrays.x, arrays.w, arrays.y};
    const int64_t names[] = {'x', 'w', 'y'};
    Part pack(kPack);
    pack.set(1001, kPointer, pointers, 3).set(1000, kInt64, names, 3).set(1003, kPointer, work);
    return pack.finalize() && !library().execute(handle, plan.get(), pack.get());
  }
};

// Up to `most` plans in the order of cuDNN's heuristic, from a place on. MXNet's workspace is that of the algorithm that it
// found to be fastest, often none, so plans have another. Those for which there is no memory are left out.
std::vector<std::unique_ptr<Plan>> plans_for(const Problem& problem, Handle handle, int64_t first, size_t most) {
  constexpr int64_t kMostBytes = 128 << 20;  // of a workspace
  std::vector<std::unique_ptr<Plan>> plans;
  const auto tensor = [](Part& part, int64_t name, const int64_t* sizes) {
    const int type = kHalf;
    part.set(901, kOfType, type).set(902, kInt64, sizes, 4).set(903, kInt64, sizes + 4, 4);
    return part.set(906, kInt64, name).set(900, kInt64, kAlignment).finalize();
  };
  Part x(kTensor), w(kTensor), y(kTensor), convolution(kConvolution), operation(problem.pass->operation), graph(kGraph),
      heuristic(kHeuristic);
  const int type = kFloat, mode = kCrossCorrelation, best = kBestFirst;
  const int64_t two = 2;
  convolution.set(100, kOfType, type).set(101, kOfMode, mode).set(106, kInt64, two).set(105, kInt64, problem.pads, 2);
  convolution.set(104, kInt64, problem.pads, 2).set(103, kInt64, problem.strides, 2);
  convolution.set(102, kInt64, problem.dilations, 2);
  if (!tensor(x, 'x', problem.x) || !tensor(w, 'w', problem.w) || !tensor(y, 'y', problem.y) || !convolution.finalize())
    return plans;
  const Pass& pass = *problem.pass;
  const Descriptor of[] = {convolution.get(), w.get(), x.get(), y.get()};
  operation.set(pass.convolution, kDescriptor, of[0]).set(pass.w, kDescriptor, of[1]).set(pass.x, kDescriptor, of[2]);
  operation.set(pass.y, kDescriptor, of[3]).set(pass.alpha, kOfFloat, 1.0f);
  if (!operation.set(pass.beta, kOfFloat, problem.adds ? 1.0f : 0.0f).finalize()) return plans;
  const Descriptor pass_of_graph = operation.get();
  if (!graph.set(800, kOfHandle, handle).set(801, kDescriptor, pass_of_graph).finalize()) return plans;
  const Descriptor whole = graph.get();
  if (!heuristic.set(201, kDescriptor, whole).set(200, kOfHeuristic, best).finalize()) return plans;
  int64_t count = 0;
  if (library().get(heuristic.get(), 202, kDescriptor, 0, &count, nullptr)) return plans;
  std::vector<std::unique_ptr<Part>> configurations;
  std::vector<Descriptor> pointers;
  for (int64_t i = 0; i < count; i++) {
    configurations.emplace_back(new Part(kConfiguration));
    pointers.push_back(configurations.back()->get());
  }
  if (library().get(heuristic.get(), 202, kDescriptor, count, &count, pointers.data())) return plans;
  for (int64_t i = first; i < count && plans.size() < most; i++) {
    std::unique_ptr<Plan> plan(new Plan);
    int64_t values;
    plan->place = i;
    if (plan->plan.set(400, kOfHandle, handle).set(401, kDescriptor, pointers[i]).finalize() &&
        !library().get(plan->plan.get(), 402, kInt64, 1, &values, &plan->bytes) && plan->bytes <= kMostBytes &&
        (!plan->bytes || workspace(handle, plan->bytes)))
      plans.push_back(std::move(plan));
  }
  return plans;
}

// Functions of the CUDA runtime that measure time on a GPU.
struct Clock {
  int (*create)(Event*) = runtime<int (*)(Event*)>("cudaEventCreate");
  int (*destroy)(Event) = runtime<int (*)(Event)>("cudaEventDestroy");
  int (*record)(Event, Stream) = runtime<int (*)(Event, Stream)>("cudaEventRecord");
  int (*wait)(Event) = runtime<int (*)(Event)>("cudaEventSynchronize");
  int (*elapsed)(float*, Event, Event) = runtime<int (*)(float*, Event, Event)>("cudaEventElapsedTime");

  bool complete() const { return create && destroy && record && wait && elapsed; }
  // The milliseconds of some runs; many, if one fails.
  template <class F> float measure(Stream stream, F run) const {
    constexpr int kRuns = 3;
    constexpr float kMany = 1e30f;
    Event begin = nullptr, end = nullptr;
    float milliseconds = kMany;
    bool good = run() && !create(&begin) && !create(&end) && !record(begin, stream);
    for (int i = 0; i < kRuns && good; i++) good = run();
    good = good && !record(end, stream) && !wait(end) && !elapsed(&milliseconds, begin, end);
    for (Event event : {begin, end})
      if (event) destroy(event);
    return good ? milliseconds : kMany;
  }
};

// The fastest of four plans on these arrays; the first, where the result is added to an array, or MXNet's setting excludes
// a search.
std::unique_ptr<Plan> fastest(const Problem& problem, Handle handle, const Arrays& arrays) {
  auto plans = plans_for(problem, handle, 0, 4);
  if (plans.empty()) return nullptr;
  Stream stream;
  size_t best = 0;
  static const Clock clock;
  if (!problem.adds && plans.size() > 1 && setting("MXNET_CUDNN_AUTOTUNE_DEFAULT", 1) && clock.complete() &&
      !library().stream(handle, &stream)) {
    float least = 1e30f;
    for (size_t i = 0; i < plans.size(); i++) {
      const float ms = clock.measure(stream, [&] { return plans[i]->run(handle, arrays); });
      if (ms < least) least = ms, best = i;
    }
  }
  return std::move(plans[best]);
}

using Plans = std::map<std::vector<int64_t>, std::unique_ptr<Plan>>;
OfHandles<Plans>& g_plans = *new OfHandles<Plans>;
// The fastest plans' places, which all handles of a GPU share: each of MXNet's threads has its own. With the same mutex.
std::map<std::vector<int64_t>, int64_t>& g_places = *new std::map<std::vector<int64_t>, int64_t>;

const Plan* plan_for(const Problem& problem, Handle handle, const Arrays& arrays) {
  const auto key = problem.key();
  std::lock_guard<std::mutex> lock(g_plans.mutex);
  Plans& plans = g_plans[handle];
  const auto kept = plans.find(key);
  if (kept != plans.end()) return kept->second.get();
  std::unique_ptr<Plan>& plan = plans[key];
  const auto place = g_places.find(key);
  if (place == g_places.end()) {
    plan = fastest(problem, handle, arrays);
    if (plan) g_places[key] = plan->place;
  } else {
    auto rebuilt = plans_for(problem, handle, place->second, 1);
    if (!rebuilt.empty()) plan = std::move(rebuilt[0]);
  }
  return plan.get();
}

// Runs a pass by a plan. False if cuDNN has none; the function of MXNet's interface then runs.
bool run_plan(const Pass& pass, Handle handle, In alpha, In beta, Tensor xd, In x, Filter wd, In w, Tensor yd, In y,
              Descriptor convolution) {
  static const auto device = runtime<int (*)(int*)>("cudaGetDevice");
  if (!library().complete || !device || ((uintptr_t)x | (uintptr_t)w | (uintptr_t)y) % kAlignment) return false;
  Problem problem{};
  bool channels_last;
  if (!read(xd, problem.x) || !read_filter(wd, problem.w, &channels_last) || !read(yd, problem.y) ||
      !read_convolution(convolution, channels_last, &problem))
    return false;
  const float scale = *(const float*)alpha, added = *(const float*)beta;
  if (scale != 1 || (added != 0 && added != 1)) return false;
  problem.pass = &pass, problem.adds = added == 1;
  if (device(&problem.device)) return false;
  const Arrays arrays{x, w, y};
  const Plan* const plan = plan_for(problem, handle, arrays);
  return plan && plan->run(handle, arrays);
}

}  // namespace

void forget_plans(void* handle) { g_plans.forget(handle); }

API int cudnnConvolutionForward(Handle handle, In alpha, Tensor xd, In x, Filter wd, In w, Descriptor convolution,
                                int algorithm, Out work, size_t room, In beta, Tensor yd, Out y) {
  if (run_plan(kForward, handle, alpha, beta, xd, x, wd, w, yd, y, convolution)) return 0;
  return translated(NEWER(cudnnConvolutionForward)(handle, alpha, xd, x, wd, w, convolution, algorithm, work, room, beta,
                                                   yd, y));
}

API int cudnnConvolutionBackwardData(Handle handle, In alpha, Filter wd, In w, Tensor yd, In y, Descriptor convolution,
                                     int algorithm, Out work, size_t room, In beta, Tensor xd, Out x) {
  if (run_plan(kBackwardData, handle, alpha, beta, xd, x, wd, w, yd, y, convolution)) return 0;
  return translated(NEWER(cudnnConvolutionBackwardData)(handle, alpha, wd, w, yd, y, convolution, algorithm, work, room,
                                                        beta, xd, x));
}

API int cudnnConvolutionBackwardFilter(Handle handle, In alpha, Tensor xd, In x, Tensor yd, In y, Descriptor convolution,
                                       int algorithm, Out work, size_t room, In beta, Filter wd, Out w) {
  if (run_plan(kBackwardFilter, handle, alpha, beta, xd, x, wd, w, yd, y, convolution)) return 0;
  return translated(NEWER(cudnnConvolutionBackwardFilter)(handle, alpha, xd, x, yd, y, convolution, algorithm, work, room,
                                                          beta, wd, w));
}

// backend/cuda/runtime/runtime.h for the CPU: one simulated GPU with one SM. Work runs when it is
// queued. Kernels run their threads in an order that changes from launch to launch.
//
// The environment variable CUDA_SHIM_FAULT makes it a bad GPU. Its value is one of
//   sm=75          an old GPU
//   memory=BYTES   a small GPU
//   busy           a GPU that another process has for itself
//   no_kernels     a GPU for which this build has no kernels
//   second         memory that is allocated meanwhile belongs to another GPU
//   lost=PATH      a GPU that fails once the file PATH exists: launches and copies still return,
//   but do
//                  nothing. The next call that waits reports the error, and so does every call
//                  after it.
//   hung=PATH      a GPU that never ends its work once the file PATH exists
//   idle           a GPU that copies, but whose kernels do nothing. All memory reads as zeros at
//                  first. With it, a benchmark measures the host's share of a step.

#include "turbomind/backend/cuda/runtime/runtime.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/check.h"

struct CUstream_st {
  std::vector<std::function<void()>>* recorded = nullptr;  // non-null while a graph is recorded
  bool is_spoilt = false;                                  // an invalid call broke that graph
  bool overlaps = false;
};

// Time is the number of launches so far, so that it does not depend on the machine.
struct CUevent_st {
  uint64_t num_launches = 0;
};

struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
};

namespace turbomind::cuda {
namespace {

constexpr size_t kAlignment = 256;
constexpr size_t kMemoryBytes = size_t{4} << 30;
// Larger allocations end in memory that the machine need not have.
constexpr size_t kMaxPoisonedBytes = size_t{1} << 30;
constexpr int kPoison = 0xff;  // NaN as a float, and far out of range as an index

struct Allocation {
  size_t num_bytes;
  std::unique_ptr<cuda_shim::Buffer> buffer;
  int gpu = 0;
};

struct Gpu {
  std::map<void*, Allocation> allocations;
  size_t used_bytes = 0;
  uint64_t num_launches = 0;
  bool is_lost = false;
  bool has_reported = false;  // that it is lost
};

Gpu& TheGpu() {
  static Gpu gpu;
  return gpu;
}

// Return the text after "name=" of the GPU's fault, "" for a fault without one, or nothing if the
// GPU does not have this fault.
std::optional<std::string> Fault(std::string_view name) {
  const char* value = std::getenv("CUDA_SHIM_FAULT");
  const std::string_view fault = value == nullptr ? "" : value;
  if (!fault.starts_with(name)) {
    return std::nullopt;
  }
  return std::string(fault.substr(std::min(fault.size(), name.size() + 1)));
}

bool HasBegun(std::string_view fault) {
  const std::optional<std::string> path = Fault(fault);
  return path.has_value() && access(path->c_str(), F_OK) == 0;
}

[[noreturn]] void Fail(const char* call, const char* why) {
  throw InternalError(std::string("CUDA: ") + call + ": " + why);
}

bool IsLost() {
  Gpu& gpu = TheGpu();
  gpu.is_lost = HasBegun("lost") || (gpu.is_lost && Fault("lost").has_value());
  gpu.has_reported = gpu.has_reported && gpu.is_lost;
  return gpu.is_lost;
}

// The beginning of a call that returns before the GPU has done its work.
void Queue(const char* call) {
  if (Fault("busy")) {
    Fail(call, "CUDA-capable device(s) is/are busy or unavailable");
  }
  if (IsLost() && TheGpu().has_reported) {
    Fail(call, "unspecified launch failure");
  }
}

// The beginning of a call that waits for the GPU.
void Wait(const char* call) {
  while (HasBegun("hung")) {
    usleep(1000);
  }
  TheGpu().has_reported = IsLost();
  Queue(call);
}

void RunOrRecord(Stream stream, const char* call, std::function<void()> work) {
  Queue(call);
  if (stream != nullptr && stream->recorded != nullptr) {
    stream->recorded->push_back(std::move(work));
  } else if (!IsLost() && !HasBegun("hung")) {
    work();
  }
}

size_t MemoryBytes() {
  const std::optional<std::string> bytes = Fault("memory");
  return bytes ? std::stoull(*bytes) : kMemoryBytes;
}

void* Allocate(size_t num_bytes) {
  const size_t whole = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
  void* memory = std::aligned_alloc(kAlignment, whole == 0 ? kAlignment : whole);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

// Check that a copy may access the bytes: inside one allocation, or outside all of them (host
// memory).
void CheckCopied(const void* address, size_t num_bytes) {
  const auto& allocations = TheGpu().allocations;
  auto after = allocations.upper_bound(const_cast<void*>(address));
  const auto begin = reinterpret_cast<uintptr_t>(address);
  if (after != allocations.end()) {
    Check(begin + num_bytes <= reinterpret_cast<uintptr_t>(after->first),
          "a copy that begins outside an allocation must not reach into it");
  }
  if (after != allocations.begin()) {
    --after;
    const auto first = reinterpret_cast<uintptr_t>(after->first);
    const uintptr_t end = first + after->second.num_bytes;
    const uintptr_t last =
        first + (after->second.num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    Check(begin >= last || begin + num_bytes <= end, "a copy must stay inside its allocation");
  }
}

}  // namespace

int NumGpus(std::string*) { return 1; }

GpuProperties PropertiesOf(int) {
  const std::optional<std::string> sm = Fault("sm");
  return {.name = "shim",
          .sm = sm ? std::stoi(*sm) : 90,
          .driver = "shim",
          .num_sms = 1,
          .memory_bytes = MemoryBytes(),
          .shared_bytes_per_block = 227 << 10};
}

// As on an H100, but for registers, which the shim does not know.
int BlocksPerSm(const void*, int threads, size_t shared_bytes) {
  constexpr size_t kSharedPerSm = 228 << 10;
  constexpr size_t kSystemShared = 1 << 10;  // of each block
  return static_cast<int>(
      std::min(kSharedPerSm / (shared_bytes + kSystemShared), 2048 / static_cast<size_t>(threads)));
}

thread_local int current_gpu = -1;  // UseGpu was never called

void UseGpu(int gpu) {
  Queue("cudaSetDevice");
  current_gpu = gpu;
}
void UseGpuToFree(int gpu) noexcept { current_gpu = gpu; }
int CurrentGpu() { return current_gpu; }

MemoryInfo GpuMemory() {
  Wait("cudaMemGetInfo");
  const size_t bytes = MemoryBytes();
  return {bytes - std::min(bytes, TheGpu().used_bytes), bytes};
}

void* AllocateGpu(size_t num_bytes) {
  Wait("cudaMalloc");
  Gpu& gpu = TheGpu();
  const size_t free_bytes = GpuMemory().free_bytes;
  if (num_bytes > free_bytes) {
    throw GpuIsFull(num_bytes, free_bytes);
  }
  void* memory = Allocate(num_bytes);
  std::memset(memory, Fault("idle") ? 0 : kPoison, std::min(num_bytes, kMaxPoisonedBytes));
  gpu.allocations[memory] = {
      num_bytes,
      std::make_unique<cuda_shim::Buffer>(memory, num_bytes, cuda_shim::Buffer::kReadWrite),
      Fault("second") ? 1 : 0};
  gpu.used_bytes += num_bytes;
  return memory;
}

void FreeGpu(void* memory) noexcept {
  Gpu& gpu = TheGpu();
  const auto found = gpu.allocations.find(memory);
  Check(found != gpu.allocations.end(), "freed memory must have been allocated");
  gpu.used_bytes -= found->second.num_bytes;
  gpu.allocations.erase(found);
  std::free(memory);
}

int GpuOf(const void* address) {
  Queue("cudaPointerGetAttributes");
  const auto& allocations = TheGpu().allocations;
  auto after = allocations.upper_bound(const_cast<void*>(address));
  if (after == allocations.begin()) {
    return kNoGpu;
  }
  --after;
  const char* const end = static_cast<const char*>(after->first) + after->second.num_bytes;
  return static_cast<const char*>(address) < end ? after->second.gpu : kNoGpu;
}

void* AllocatePinned(size_t num_bytes) {
  Wait("cudaMallocHost");
  return Allocate(num_bytes);
}
void FreePinned(void* memory) noexcept { std::free(memory); }

Stream CreateStream() {
  Queue("cudaStreamCreate");
  return new CUstream_st;
}
void DestroyStream(Stream stream) noexcept { delete stream; }

// Work runs when it is queued, and every kernel is checked as if it could overlap the one before.
void OverlapLaunches(Stream stream, bool overlap) { stream->overlaps = overlap; }
bool LaunchesOverlap(Stream stream) { return stream->overlaps; }

void Synchronize(Stream stream) {
  if (stream != nullptr) {
    stream->is_spoilt = stream->recorded != nullptr;
    Check(stream->recorded == nullptr, "Synchronize must not be called while a graph is recorded");
  }
  Wait("waiting for kernels and copies");
}

void WaitForStream(Stream, Stream) { Queue("cudaStreamWaitEvent"); }

void CopyBytes(void* to, const void* from, size_t num_bytes, Stream stream) {
  RunOrRecord(stream, "a copy", [=] {
    CheckCopied(to, num_bytes);
    CheckCopied(from, num_bytes);
    if (num_bytes > 0) {
      std::memmove(to, from, num_bytes);
    }
  });
}

void ClearBytes(void* to, size_t num_bytes, Stream stream) {
  RunOrRecord(stream, "clearing memory", [=] {
    CheckCopied(to, num_bytes);
    if (num_bytes > 0) {
      std::memset(to, 0, num_bytes);
    }
  });
}

Event CreateEvent() {
  Queue("cudaEventCreateWithFlags");
  return new CUevent_st;
}
void DestroyEvent(Event event) noexcept { delete event; }
Event CreateTimedEvent() { return CreateEvent(); }
double MicrosecondsBetween(Event begin, Event end) {
  return static_cast<double>(end->num_launches - begin->num_launches);
}
// All queued work has already run.
void Record(Event event, Stream) {
  Queue("cudaEventRecord");
  event->num_launches = TheGpu().num_launches;
}
void WaitFor(Event) { Wait("cudaEventSynchronize"); }

void BeginCapture(Stream stream) {
  Check(stream->recorded == nullptr, "only one graph may be recorded at a time");
  Queue("beginning a graph capture");
  stream->is_spoilt = false;
  stream->recorded = new std::vector<std::function<void()>>;
}

Graph EndCapture(Stream stream) {
  Check(stream->recorded != nullptr, "EndCapture needs a recording in progress");
  const std::unique_ptr<std::vector<std::function<void()>>> work(stream->recorded);
  stream->recorded = nullptr;
  Check(!stream->is_spoilt, "no invalid call may occur during a recording");
  Queue("ending a graph capture");
  return new CUgraphExec_st{std::move(*work)};
}

void LaunchGraph(Graph graph, Stream stream) {
  for (const auto& work : graph->work) {
    RunOrRecord(stream, "cudaGraphLaunch", work);
  }
}

void DestroyGraph(Graph graph) noexcept { delete graph; }

void RunOnShim(const LaunchShape& shape, Stream stream, std::function<void()> kernel) {
  Check(shape.grid_y <= kMaxGridY && shape.grid_z <= kMaxGridY && shape.threads <= 1024 &&
            shape.shared_bytes <= PropertiesOf(0).shared_bytes_per_block,
        "a launch must stay within the limits of a GPU");
  if (shape.grid_x == 0 || shape.grid_y == 0 || shape.grid_z == 0) {
    return;
  }
  if (Fault("no_kernels")) {
    Fail("a launch", "no kernel image is available for execution on the device");
  }
  if (Fault("idle")) {
    return;
  }
  RunOrRecord(stream, "a launch", [shape, kernel = std::move(kernel)] {
    cuda_shim::Launch(
        {.grid = {static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y),
                  static_cast<unsigned>(shape.grid_z)},
         .block = {static_cast<unsigned>(shape.threads), 1, 1},
         .shared_bytes = shape.shared_bytes,
         .seed = ++TheGpu().num_launches,
         .overlaps = true},
        kernel);
  });
}

}  // namespace turbomind::cuda

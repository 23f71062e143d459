// backend/cuda/runtime/runtime.h for the CPU: one simulated GPU with one SM. Work runs when it is
// queued. Kernels run their threads in an order that changes from launch to launch.

#include "turbomind/backend/cuda/runtime/runtime.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include "turbomind/backend/cuda/runtime/launch.cuh"
#include "turbomind/core/check.h"

struct CUstream_st {
  std::vector<std::function<void()>>* recorded = nullptr;  // non-null while a graph is recorded
  bool is_spoilt = false;                                  // an invalid call broke that graph
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
constexpr int kPoison = 0xff;  // NaN as a float, and far out of range as an index

struct Allocation {
  size_t num_bytes;
  std::unique_ptr<cuda_shim::Buffer> buffer;
};

struct Gpu {
  std::map<void*, Allocation> allocations;
  size_t used_bytes = 0;
  uint64_t num_launches = 0;
};

Gpu& TheGpu() {
  static Gpu gpu;
  return gpu;
}

void RunOrRecord(Stream stream, std::function<void()> work) {
  if (stream->recorded != nullptr) {
    stream->recorded->push_back(std::move(work));
  } else {
    work();
  }
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
  return {.name = "shim",
          .sm = 90,
          .driver = "shim",
          .num_sms = 1,
          .memory_bytes = kMemoryBytes,
          .shared_bytes_per_block = 227 << 10};
}

thread_local int current_gpu = -1;  // UseGpu was never called

void UseGpu(int gpu) { current_gpu = gpu; }
void UseGpuToFree(int gpu) noexcept { current_gpu = gpu; }
int CurrentGpu() { return current_gpu; }

MemoryInfo GpuMemory() { return {kMemoryBytes - TheGpu().used_bytes, kMemoryBytes}; }

void* AllocateGpu(size_t num_bytes) {
  Gpu& gpu = TheGpu();
  if (num_bytes > kMemoryBytes - gpu.used_bytes) {
    throw GpuIsFull(num_bytes, kMemoryBytes - gpu.used_bytes);
  }
  void* memory = Allocate(num_bytes);
  std::memset(memory, kPoison, num_bytes);
  gpu.allocations[memory] = {num_bytes, std::make_unique<cuda_shim::Buffer>(
                                            memory, num_bytes, cuda_shim::Buffer::kReadWrite)};
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

void* AllocatePinned(size_t num_bytes) { return Allocate(num_bytes); }
void FreePinned(void* memory) noexcept { std::free(memory); }

Stream CreateStream() { return new CUstream_st; }
void DestroyStream(Stream stream) noexcept { delete stream; }

void Synchronize(Stream stream) {
  stream->is_spoilt = stream->recorded != nullptr;
  Check(stream->recorded == nullptr, "Synchronize must not be called while a graph is recorded");
}

void CopyBytes(void* to, const void* from, size_t num_bytes, Stream stream) {
  RunOrRecord(stream, [=] {
    CheckCopied(to, num_bytes);
    CheckCopied(from, num_bytes);
    if (num_bytes > 0) {
      std::memmove(to, from, num_bytes);
    }
  });
}

void ClearBytes(void* to, size_t num_bytes, Stream stream) {
  RunOrRecord(stream, [=] {
    CheckCopied(to, num_bytes);
    if (num_bytes > 0) {
      std::memset(to, 0, num_bytes);
    }
  });
}

Event CreateEvent() { return new CUevent_st; }
void DestroyEvent(Event event) noexcept { delete event; }
Event CreateTimedEvent() { return CreateEvent(); }
double MicrosecondsBetween(Event begin, Event end) {
  return static_cast<double>(end->num_launches - begin->num_launches);
}
// All queued work has already run.
void Record(Event event, Stream) { event->num_launches = TheGpu().num_launches; }
void WaitFor(Event) {}

void BeginCapture(Stream stream) {
  Check(stream->recorded == nullptr, "only one graph may be recorded at a time");
  stream->is_spoilt = false;
  stream->recorded = new std::vector<std::function<void()>>;
}

Graph EndCapture(Stream stream) {
  Check(stream->recorded != nullptr, "EndCapture needs a recording in progress");
  const std::unique_ptr<std::vector<std::function<void()>>> work(stream->recorded);
  stream->recorded = nullptr;
  Check(!stream->is_spoilt, "no invalid call may occur during a recording");
  return new CUgraphExec_st{std::move(*work)};
}

void LaunchGraph(Graph graph, Stream) {
  for (const auto& work : graph->work) {
    work();
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
  RunOrRecord(stream, [shape, kernel = std::move(kernel)] {
    cuda_shim::Launch(
        {.grid = {static_cast<unsigned>(shape.grid_x), static_cast<unsigned>(shape.grid_y),
                  static_cast<unsigned>(shape.grid_z)},
         .block = {static_cast<unsigned>(shape.threads), 1, 1},
         .shared_bytes = shape.shared_bytes,
         .seed = ++TheGpu().num_launches},
        kernel);
  });
}

}  // namespace turbomind::cuda

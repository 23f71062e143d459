#include "turbomind/core/mapped_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr size_t kMaxFiles = 4096;

// The handler reads the atomics only. A signal has no other way to the data than a global variable.
struct Slot {
  std::atomic<uintptr_t> begin = 0;  // 0: free
  std::atomic<size_t> num_bytes = 0;
  std::atomic<bool> lost = false;
  std::string name;  // under `mutex`
};

std::array<Slot, kMaxFiles> slots;
std::atomic<int64_t> num_lost = 0;  // files that were ever lost
std::mutex mutex;
struct sigaction previous = {};
uintptr_t page_bytes = 4096;

bool Contains(const Slot& slot, uintptr_t address) {
  const uintptr_t begin = slot.begin.load();
  return begin != 0 && address >= begin && address - begin < slot.num_bytes.load();
}

// Replaces the mapping from the page of `address` on by zeros. Returns false if that fails.
bool MapZeros(Slot& slot, uintptr_t address) {
  const uintptr_t page = address / page_bytes * page_bytes;
  const uintptr_t end = slot.begin.load() + slot.num_bytes.load();
  const size_t num_bytes = (end - page + page_bytes - 1) / page_bytes * page_bytes;
  if (mmap(reinterpret_cast<void*>(page), num_bytes, PROT_READ,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED) {
    return false;
  }
  if (!slot.lost.exchange(true)) {
    ++num_lost;
  }
  return true;
}

// Async-signal-safe: it uses atomics and system calls only.
void OnBusError(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  for (Slot& slot : slots) {
    if (Contains(slot, address) && MapZeros(slot, address)) {
      errno = error;
      return;
    }
  }
  errno = error;
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    sigaction(signal, &previous, nullptr);  // the access is repeated and ends the process
  } else {
    previous.sa_handler(signal);
  }
}

// Installs the handler unless it is the current one. REQUIRES: `mutex` is held.
void InstallHandler() {
  page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  struct sigaction current = {};
  sigaction(SIGBUS, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == &OnBusError) {
    return;
  }
  previous = current;
  struct sigaction ours = {};
  ours.sa_sigaction = &OnBusError;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

MappedFile::MappedFile(const void* data, size_t num_bytes, std::string name) : slot_(0) {
  const std::lock_guard lock(mutex);
  while (slot_ < kMaxFiles && slots[slot_].begin.load() != 0) {
    ++slot_;
  }
  if (slot_ == kMaxFiles) {
    throw InvalidArgument("At most " + std::to_string(kMaxFiles) + " files can be mapped.");
  }
  InstallHandler();
  Slot& slot = slots[slot_];
  slot.name = std::move(name);
  slot.lost = false;
  slot.num_bytes = num_bytes;
  slot.begin = reinterpret_cast<uintptr_t>(data);
}

MappedFile::~MappedFile() { slots[slot_].begin = 0; }

std::string LostFile(const void* data) {
  if (num_lost.load() == 0) {
    return "";
  }
  const std::lock_guard lock(mutex);
  for (const Slot& slot : slots) {
    if (Contains(slot, reinterpret_cast<uintptr_t>(data)) && slot.lost.load()) {
      return slot.name;
    }
  }
  return "";
}

void CheckMappedFile(const void* data) {
  if (const std::string name = LostFile(data); !name.empty()) {
    throw std::runtime_error(name +
                             ": The file was truncated or could not be read while it was in use. "
                             "Restore it and start again.");
  }
}

}  // namespace turbomind

#include "turbomind/backend/cuda_loader.h"

#include <dlfcn.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr char kFileName[] = "libturbomind_cuda.so";
constexpr char kVariable[] = "LMDEPLOY_CUDA_LIBRARY";
constexpr size_t kMaxShown = 120;

// Returns a foreign text with printable characters only, cut to one short line.
std::string Shown(const char* text) {
  std::string line;
  for (; text != nullptr && *text != '\0' && line.size() < kMaxShown; ++text) {
    line += std::isprint(static_cast<unsigned char>(*text)) != 0 ? *text : ' ';
  }
  return line;
}

struct LibraryFile {
  std::filesystem::path path;
  bool named = false;  // by the environment variable
};

LibraryFile FindFile() {
  if (const char* named = std::getenv(kVariable); named != nullptr && *named != '\0') {
    return {std::filesystem::absolute(named), true};
  }
  Dl_info here;
  if (dladdr(reinterpret_cast<const void*>(&FindFile), &here) == 0 || here.dli_fname == nullptr) {
    return {kFileName, false};
  }
  return {std::filesystem::absolute(here.dli_fname).parent_path() / kFileName, false};
}

// Returns null on failure and sets `why`.
const CudaLibrary* Open(std::string* why) {
  const LibraryFile file = FindFile();
  const std::string from = file.named ? std::string(kVariable) + ": " : "";
  std::error_code ignored;
  if (!std::filesystem::exists(file.path, ignored)) {
    *why = from + "no " + file.path.string() +
           " was found. Build it with nvcc: " + "CMAKE_ARGS=-DTM_CUDA=ON pip install .";
    return nullptr;
  }
  void* handle = dlopen(file.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    *why = from + "cannot be loaded: " + Shown(dlerror());
    return nullptr;
  }
  const auto get = reinterpret_cast<GetCudaLibrary>(dlsym(handle, kCudaLibrarySymbol));
  if (get == nullptr) {
    *why = from + file.path.string() + " has no symbol " + kCudaLibrarySymbol;
    dlclose(handle);
    return nullptr;
  }
  const CudaLibrary* library = get();
  const std::string stamp = Shown(library->stamp);
  const bool is_shim = file.named && stamp == std::string(CudaStamp()) + TM_SHIM_SUFFIX;
  if (stamp != CudaStamp() && !is_shim) {
    *why = from + file.path.string() + " was built for another version: it has stamp " + stamp +
           ", but the engine needs " + CudaStamp() + ". Build the library and the engine together.";
    dlclose(handle);
    return nullptr;
  }
  return library;
}

// Held during every call into the library.
std::mutex& Mutex() {
  static std::mutex mutex;
  return mutex;
}

// Returns null on failure and sets `why`. REQUIRES: the mutex is held.
const CudaLibrary* Library(std::string* why) {
  static const CudaLibrary* library = nullptr;
  if (library == nullptr) {
    library = Open(why);
  }
  return library;
}

[[noreturn]] void ThrowUnusable(const std::string& why) {
  throw InvalidArgument("CUDA is not used: " + why);
}

// REQUIRES: the mutex is held. Throws InvalidArgument unless the GPU exists.
const CudaLibrary& LibraryFor(int ordinal) {
  std::string why;
  const CudaLibrary* library = Library(&why);
  std::vector<CudaDeviceInfo> gpus;
  if (library != nullptr) {
    library->list(&gpus, &why);
  }
  if (gpus.empty()) {
    ThrowUnusable(why);
  }
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= gpus.size()) {
    throw InvalidArgument("GPU " + std::to_string(ordinal) + " does not exist. Use 0 to " +
                          std::to_string(gpus.size() - 1) + " (--devices)");
  }
  return *library;
}

std::string OfGpu(int ordinal, const std::string& why) {
  return "GPU " + std::to_string(ordinal) + ": " + why;
}

}  // namespace

const char* CudaStamp() { return TM_CUDA_STAMP " " TM_STANDARD_LIBRARY; }

const CudaLibrary* FindCudaLibrary(std::string* why_none) {
  const std::lock_guard lock(Mutex());
  std::string why;
  const CudaLibrary* const library = Library(&why);
  if (why_none != nullptr) {
    *why_none = library == nullptr ? why : "";
  }
  return library;
}

std::vector<CudaDeviceInfo> CudaDevices(std::string* why_none) {
  const std::lock_guard lock(Mutex());
  std::string why;
  std::vector<CudaDeviceInfo> gpus;
  if (const CudaLibrary* library = Library(&why); library != nullptr) {
    library->list(&gpus, &why);
  }
  if (why_none != nullptr) {
    *why_none = gpus.empty() ? why : "";
  }
  return gpus;
}

std::shared_ptr<Device> MakeCudaDevice(int ordinal, const CudaDeviceOptions& options) {
  const std::lock_guard lock(Mutex());
  std::string why;
  Device* const device = LibraryFor(ordinal).make_device(ordinal, options, &why);
  if (device == nullptr) {
    ThrowUnusable(OfGpu(ordinal, why));
  }
  return std::shared_ptr<Device>(device);
}

}  // namespace turbomind

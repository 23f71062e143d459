#include "turbomind/core/mapped_file.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

constexpr size_t kPages = 8;

// A file of kPages pages of ones, mapped for reading.
struct Mapping {
  Mapping() {
    std::array<char, 32> path = {"/tmp/mapped_file_test_XXXXXX"};
    descriptor = mkstemp(path.data());
    unlink(path.data());
    const std::vector<char> ones(num_bytes, 1);
    REQUIRE(write(descriptor, ones.data(), num_bytes) == static_cast<ssize_t>(num_bytes));
    data = static_cast<char*>(mmap(nullptr, num_bytes, PROT_READ, MAP_SHARED, descriptor, 0));
    REQUIRE(data != MAP_FAILED);
  }
  ~Mapping() {
    munmap(data, num_bytes);
    close(descriptor);
  }
  void Truncate(size_t pages) const {
    REQUIRE(ftruncate(descriptor, static_cast<off_t>(pages * page)) == 0);
  }

  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t num_bytes = kPages * page;
  int descriptor = -1;
  char* data = nullptr;
};

TEST_CASE("readers of a truncated file get zeros, and only this file is lost") {
  const Mapping mapping;
  const Mapping other;
  const MappedFile file(mapping.data, mapping.num_bytes, "model.gguf");
  const MappedFile other_file(other.data, other.num_bytes, "other.gguf");
  CHECK(LostFile(mapping.data).empty());
  mapping.Truncate(3);
  const volatile char* bytes = mapping.data;
  CHECK(bytes[3 * mapping.page - 1] == 1);
  CHECK(LostFile(mapping.data).empty());  // no lost page was read
  CHECK(bytes[5 * mapping.page] == 0);
  CHECK(LostFile(mapping.data) == "model.gguf");
  CHECK(bytes[3 * mapping.page] == 0);
  CHECK(bytes[mapping.num_bytes - 1] == 0);
  CHECK(bytes[0] == 1);
  CHECK(std::count(other.data, other.data + other.num_bytes, 1) ==
        static_cast<long>(other.num_bytes));
  CHECK(LostFile(other.data).empty());
  CHECK_NOTHROW(CheckMappedFile(other.data));
  CHECK_THROWS_WITH_AS(CheckMappedFile(mapping.data + 7),
                       doctest::Contains("model.gguf: The file was"), std::runtime_error);
}

TEST_CASE("a file that is no longer protected is not lost") {
  const Mapping mapping;
  auto file = std::make_unique<MappedFile>(mapping.data, mapping.num_bytes, "model.gguf");
  mapping.Truncate(0);
  const volatile char* bytes = mapping.data;
  CHECK(bytes[0] == 0);
  CHECK_FALSE(LostFile(mapping.data).empty());
  file.reset();
  CHECK(LostFile(mapping.data).empty());
}

TEST_CASE("a bus error outside protected files ends the process as before") {
  const Mapping protected_mapping;
  const Mapping mapping;
  mapping.Truncate(0);
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGBUS, SIG_DFL);  // sanitizers install handlers that exit
    const MappedFile file(protected_mapping.data, protected_mapping.num_bytes, "model.gguf");
    const volatile char* bytes = mapping.data;
    _exit(bytes[0]);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGBUS);
}

}  // namespace
}  // namespace turbomind

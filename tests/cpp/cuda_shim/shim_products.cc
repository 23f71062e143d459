// Products of warp groups: what they read and when they happen.

#include <algorithm>
#include <cstring>

#include "cuda_shim/shim_state.h"
#include "turbomind/core/float_convert.h"

namespace turbomind::cuda_shim {
namespace {

constexpr int kProductRows = 64;   // of a
constexpr int kProductSteps = 16;  // columns of a

bool AreUntouched(const float* sums, size_t count) {
  return std::all_of(sums, sums + count, [](float sum) { return FloatBits(sum) == ~0u; });
}

float ValueAt(const Product& product, const void* values, int index) {
  uint16_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(values) + 2 * index, sizeof(bits));
  return product.is_bfloat ? BFloat16ToFloat(bits) : HalfToFloat(bits);
}

// Return what the number of a piece of 16 bytes is combined with in this row.
int Swizzle(const Product& product, int row) {
  return product.row_bytes == 128 ? row % 8 : row / 2 % 4;
}

// Return whether the current thread knows that a write is over. Lanes of a warp know each other's.
bool IsKnown(const Write& write) {
  const State& s = TheState();
  const Thread& me = Current();
  const int warp = s.threads[static_cast<size_t>(write.thread)].warp;
  const auto at = static_cast<size_t>(warp);
  return warp == me.warp || write.part <= std::max(me.known[at], s.block_clock[at]);
}

// Check `num_rows` rows that a product reads. The lanes of a warp share the words.
void CheckRows(const Product& product, const char* rows, int num_rows) {
  const State& s = TheState();
  const auto bytes = static_cast<size_t>(num_rows) * static_cast<size_t>(product.row_bytes);
  CheckAccess(Space::kShared, rows, bytes, static_cast<size_t>(8 * product.row_bytes));
  const auto first = static_cast<size_t>(rows - s.shared_begin) / 4;
  for (auto word = first + static_cast<size_t>(Current().lane); word < first + bytes / 4;
       word += kWarp) {
    const Write& write = s.writes[word];
    if (write.block != s.num_blocks) {
      continue;
    }
    if (write.fences == s.threads[static_cast<size_t>(write.thread)].shared_fences) {
      Fail("a product reads shared memory that was written without a fence after it");
    }
    if (!IsKnown(write)) {
      Fail("a product reads shared memory that another warp wrote without a barrier after it");
    }
  }
}

const char* TileOf(const Product& product, const char* columns) {
  return columns - reinterpret_cast<uintptr_t>(columns) % static_cast<size_t>(product.row_bytes);
}

void CheckColumns(const Product& product, const char* columns, int num_rows) {
  CheckRows(product, TileOf(product, columns), num_rows);
  CheckAccess(Space::kShared, columns, 32, 32);
}

void CheckTiles(const Product& product) {
  if (product.a != nullptr) {
    CheckColumns(product, product.a, kProductRows);
  }
  if (!product.is_transposed) {
    CheckColumns(product, product.b, product.num_columns);
    return;
  }
  for (int column = 0; column < product.num_columns; column += product.row_bytes / 2) {
    const int slab = column * 2 / product.row_bytes;
    CheckRows(product, product.b + slab * product.slab_bytes, kProductSteps);
  }
}

using StepValues = float[kProductSteps];

// Read a row of a tile from 16 columns on.
void ReadColumns(const Product& product, const char* columns, int row, StepValues& values) {
  const char* tile = TileOf(product, columns);
  for (int k = 0; k < kProductSteps; ++k) {
    const auto piece = static_cast<int>(columns - tile) / 16 + k / 8;
    const char* from = tile + row * product.row_bytes + (piece ^ Swizzle(product, row)) * 16;
    values[k] = ValueAt(product, from, k % 8);
  }
}

// Read the values of b for a column of the sums.
void ReadFactors(const Product& product, int column, StepValues& values) {
  if (!product.is_transposed) {
    ReadColumns(product, product.b, column, values);
    return;
  }
  const int slab_columns = product.row_bytes / 2;
  const char* slab = product.b + column / slab_columns * product.slab_bytes;
  const int at = column % slab_columns;
  for (int k = 0; k < kProductSteps; ++k) {
    const char* from = slab + k * product.row_bytes + (at / 8 ^ Swizzle(product, k)) * 16;
    values[k] = ValueAt(product, from, at % 8);
  }
}

// Lane 4 g + t has the rows g and g + 8 of its warp's, and the columns 8 n + 2 t and the next one.
void Perform(Thread& thread, const Product& product) {
  std::vector<float>& sums = thread.sums[product.sums].values;
  StepValues a[2];
  for (int half = 0; half < 2; ++half) {
    if (product.a == nullptr) {
      for (int k = 0; k < kProductSteps; ++k) {
        a[half][k] = ValueAt(product, product.factors[half], k);
      }
    } else {
      const int row = thread.warp % kGroupWarps * 16 + thread.lane / 4 + 8 * half;
      ReadColumns(product, product.a, row, a[half]);
    }
  }
  for (int column = thread.lane % 4 * 2; column < product.num_columns;
       column += column % 2 == 0 ? 1 : 7) {
    StepValues b;
    ReadFactors(product, column, b);
    for (int half = 0; half < 2; ++half) {
      float& sum = sums[static_cast<size_t>(column / 8 * 4 + half * 2 + column % 2)];
      sum = product.adds ? sum : 0.f;
      for (int k = 0; k < kProductSteps; ++k) {
        sum += a[half][k] * b[k];
      }
    }
  }
}

// Perform the thread's first `count` products, unless they have happened.
void PerformProducts(Thread& thread, int count) {
  int index = 0;
  const auto perform = [&](const std::vector<Product>& products) {
    for (const Product& product : products) {
      if (index >= thread.num_performed && index < count) {
        Perform(thread, product);
      }
      ++index;
    }
  };
  for (const std::vector<Product>& group : thread.product_groups) {
    perform(group);
  }
  perform(thread.new_products);
  thread.num_performed = std::max(thread.num_performed, count);
}

}  // namespace

void StartProduct(const Product& product) {
  Thread& me = Current();
  if (!me.registers_fenced) {
    Fail("a product starts without a fence of the registers since the last group");
  }
  CheckTiles(product);
  const auto count = static_cast<size_t>(product.num_columns) / 2;
  Sums& sums = me.sums[product.sums];
  if (sums.num_products++ == 0) {
    sums.values.assign(product.sums, product.sums + count);
  } else if (!AreUntouched(product.sums, count)) {
    Fail("sums were changed before their products were waited for");
  }
  std::memset(product.sums, kPoison, count * sizeof(float));
  me.new_products.push_back(product);
  ++me.num_products;
  if (TheState().random() % 2 == 0) {
    int pending = static_cast<int>(me.new_products.size());
    for (const auto& group : me.product_groups) {
      pending += static_cast<int>(group.size());
    }
    PerformProducts(me, pending);
  }
}

void CommitProducts() {
  Thread& me = Current();
  me.product_groups.push_back(me.new_products);
  me.new_products.clear();
  me.registers_fenced = false;
}

namespace {

// Check that the lane's factors in registers have not changed since the start of the product.
void CheckFactors(const Thread& thread, const Product& product) {
  for (int i = 0; product.own_factors != nullptr && i < 4; ++i) {
    if (product.own_factors[i] != product.factors[i % 2][i / 2 * 4 + thread.lane % 4]) {
      Fail("factors were changed before their products were waited for");
    }
  }
}

}  // namespace

void WaitForProducts(int newest) {
  Thread& me = Current();
  while (static_cast<int>(me.product_groups.size()) > newest) {
    const auto size = static_cast<int>(me.product_groups.front().size());
    PerformProducts(me, size);
    for (const Product& product : me.product_groups.front()) {
      CheckFactors(me, product);
      Sums& sums = me.sums[product.sums];
      if (--sums.num_products == 0) {
        if (!AreUntouched(product.sums, sums.values.size())) {
          Fail("sums were changed before their products were waited for");
        }
        std::copy(sums.values.begin(), sums.values.end(), product.sums);
        me.sums.erase(product.sums);
      }
    }
    me.product_groups.pop_front();
    me.num_performed -= size;
  }
}

void FenceShared() { ++Current().shared_fences; }
void FenceRegisters() { Current().registers_fenced = true; }

}  // namespace turbomind::cuda_shim

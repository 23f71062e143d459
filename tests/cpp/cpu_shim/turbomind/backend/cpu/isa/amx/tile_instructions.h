#pragma once

// Replaces the header of the same name in src.

#include <cstdint>

#include "cpu_shim/tile_registers.h"
#include "turbomind/core/host_device.h"

namespace turbomind::TM_ISA {

TM_HD void LoadTileConfig(const void* shape) { cpu_shim::LoadTileConfig(shape); }
TM_HD void ReleaseTiles() { cpu_shim::ReleaseTiles(); }
template <int T>
TM_HD void LoadTile(const void* rows, int64_t stride) {
  cpu_shim::LoadTile(T, rows, stride);
}
template <int T>
TM_HD void LoadStreamedTile(const void* rows, int64_t stride) {
  cpu_shim::LoadTile(T, rows, stride);
}
template <int T>
TM_HD void StoreTile(void* rows, int64_t stride) {
  cpu_shim::StoreTile(T, rows, stride);
}
template <int T>
TM_HD void ZeroTile() {
  cpu_shim::ZeroTile(T);
}
template <int C, int A, int B>
TM_HD void DotBytes() {
  cpu_shim::DotBytes({C, A, B});
}
template <int C, int A, int B>
TM_HD void DotUnsigned() {
  cpu_shim::DotUnsigned({C, A, B});
}
template <int C, int A, int B>
TM_HD void DotBf16() {
  cpu_shim::DotBf16({C, A, B});
}

}  // namespace turbomind::TM_ISA

#include "turbomind/ops/nvfp4.h"

#include <doctest/doctest.h>

#include "turbomind/core/float_convert.h"

using namespace turbomind;

TEST_CASE("a scale of NVFP4 has the value of its E4M3 number without the sign") {
  for (int scale = 0; scale < 0x7f; ++scale) {
    CHECK(NvScaleToFloat(static_cast<uint8_t>(scale)) == E4M3ToFloat(static_cast<uint8_t>(scale)));
    CHECK(NvScaleToFloat(static_cast<uint8_t>(scale | 0x80)) ==
          NvScaleToFloat(static_cast<uint8_t>(scale)));
  }
  CHECK(NvScaleToFloat(0x7f) == 480.f);
}

#pragma once

// The strides of the layouts: the only code that depends on a layout. Where rows lie is computed
// from them in turbomind/backend/row_transfer.h.

#include <cstddef>
#include <cstdint>

#include "kvx/kvx_abi.h"
#include "kvx/src/validate.h"
#include "turbomind/backend/row_transfer.h"

namespace kvx {

// REQUIRES: CheckCache accepted the tensor.
inline turbomind::PagedView ViewOf(const kvx_tensor_desc_t& tensor, int64_t head_dim) {
  const int64_t bytes = ElementBytes(Raw(tensor.dtype));
  const auto stride = [&](int i) { return tensor.shape[i] > 1 ? tensor.stride[i] * bytes : 0; };
  turbomind::PagedView view;
  view.base = static_cast<std::byte*>(tensor.data);
  view.block = stride(0);
  view.value = stride(3);
  int64_t pack = head_dim;
  switch (Raw(tensor.layout)) {
    case KVX_LAYOUT_BLOCK_HND_PACKED:
      view.head = stride(1);
      view.chunk = stride(2);
      view.token = stride(3);
      view.value = stride(4);
      pack = tensor.shape[4];
      break;
    case KVX_LAYOUT_BLOCK_HND:
      view.head = stride(1);
      view.token = stride(2);
      break;
    default:
      view.token = stride(1);
      view.head = stride(2);
  }
  if (pack == 1) {  // one chunk of values that are `chunk` apart
    view.value = view.chunk;
    pack = head_dim;
  }
  if (pack == head_dim) {
    view.chunk = 0;
  }
  view.pack = static_cast<uint32_t>(pack);
  return view;
}

}  // namespace kvx

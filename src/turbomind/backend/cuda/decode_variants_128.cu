#include "turbomind/backend/cuda/decode_variants_of.h"

namespace turbomind::cuda {

template DecodeVariant FindVariant<128, false>(const DecodeFormat& format);

}  // namespace turbomind::cuda

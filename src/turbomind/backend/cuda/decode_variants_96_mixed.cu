#include "turbomind/backend/cuda/decode_variants_of.h"

namespace turbomind::cuda {

template DecodeVariant FindVariant<96, true>(const DecodeFormat& format);

}  // namespace turbomind::cuda

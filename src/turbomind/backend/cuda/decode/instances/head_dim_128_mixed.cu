#include "turbomind/backend/cuda/decode/decode_variants_of.cuh"

namespace turbomind::cuda {

template DecodeVariant FindVariant<128, true>(const DecodeFormat& format);

}  // namespace turbomind::cuda

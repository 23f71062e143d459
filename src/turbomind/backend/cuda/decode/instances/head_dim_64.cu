#include "turbomind/backend/cuda/decode/decode_variants_of.cuh"

namespace turbomind::cuda {

template DecodeVariant FindVariant<64, false>(const DecodeFormat& format);

}  // namespace turbomind::cuda

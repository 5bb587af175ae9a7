// Fixed-width names without host headers: NVRTC has none, and device code here includes no other.
#pragma once

using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

namespace tpw {

// bf16 values travel as their 16 bits; conversions are written out in score.cuh, so that no header decides the rounding.
using bf16 = uint16_t;

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xffffffffu;

}  // namespace tpw

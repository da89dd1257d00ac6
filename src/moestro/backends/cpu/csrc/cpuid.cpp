#include "cpuid.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace moestro {

#if defined(__x86_64__)
// The builtins also ask the system whether it saves the wide registers.
bool cpu_has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}
bool cpu_has_avx512() {
    __builtin_cpu_init();
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}
#if defined(__linux__)
bool cpu_has_amx() {
    static const bool has = [] {
        unsigned a, b, c, d;
        constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
        if (!cpu_has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
        if ((d & kBf16) == 0 || (d & kTile) == 0 || (d & kInt8) == 0) return false;
        constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(2)
        return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    }();
    return has;
}
#else
bool cpu_has_amx() { return false; }
#endif
#else
bool cpu_has_avx2() { return false; }
bool cpu_has_amx() { return false; }
bool cpu_has_avx512() { return false; }
#endif

}  // namespace moestro

// What the processor (and the system) can run.
#pragma once

namespace moestro {

bool cpu_has_avx2();
bool cpu_has_avx512();

}  // namespace moestro

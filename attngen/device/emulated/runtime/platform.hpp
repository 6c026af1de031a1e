// What a kernel's text says differently on each operating system.
#pragma once

// Called by Python; of the runtime, all else is hidden.
#if defined(_WIN32)
#define EMULATOR_EXPORTED __declspec(dllexport)
#else
#define EMULATOR_EXPORTED __attribute__((visibility("default")))
#endif

// Where static __shared__ arrays lie: in memory of the library whose bounds `static_shared` knows (posix.cpp, windows.cpp). `used`: it is
// not known to the compiler who accesses it.
#if defined(_WIN32)
#define EMULATOR_SHARED static __attribute__((used, section("shared$b")))
#elif defined(__APPLE__)
#define EMULATOR_SHARED static __attribute__((used, section("__DATA,__shared")))
#else  // thread-local, as GCC ignores the section of a variable in a template; they are those of the CPU thread that launches
#define EMULATOR_SHARED thread_local __attribute__((used))
#endif

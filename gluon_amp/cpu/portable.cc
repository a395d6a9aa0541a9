// Makes a wheel from a current compiler run with glibc and libstdc++ of 2018: Ubuntu 18.04, Debian 10, RHEL 8.
// Newer headers use three symbols that these lack. The library defines them, and does not export them
// (setup.py's list of exports). `make wheel` fails if a compiler requires more.
#include <new>
#include <sstream>

#ifndef __GLIBCXX__
#error "gluon_amp's engine shares strings, maps and functions with MXNet: compile it with GCC's libstdc++"
#endif

#if __has_include(<sys/single_threaded.h>)
#include <sys/single_threaded.h>
// From glibc 2.32: whether the process has one thread. 0 costs atomic counts, and is always correct.
char __libc_single_threaded = 0;
#endif

namespace std {
void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }  // from GCC 11's libstdc++
}  // namespace std

// std::ostringstream's constructor without arguments, from GCC 9's libstdc++; it is the same as the constructor
// with a mode, which all versions have.
extern "C" void _ZNSt19basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev(void* place) {
  new (place) std::ostringstream(std::ios_base::out);
}

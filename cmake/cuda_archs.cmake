# Resolves TM_CUDA_ARCHS to the GPU architectures that nvcc compiles for.

set(TM_CUDA_ARCHS AUTO CACHE STRING
    "Architectures for nvcc: AUTO (the GPUs of this machine, else ALL), ALL, or a list such as 80;90a;100f;90-virtual")

# Machine code for each kind of GPU, and PTX for GPUs newer than the compiler. With PTX, FP4 is
# converted in software.
set(tm_all_cuda_archs 80 86 89 90a 100f 110f 120f 90-virtual)
set(tm_min_sm 80)

# Sets `out` to the numbers of the architectures that nvcc supports; empty if nvcc does not list
# them.
function(tm_known_archs out)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-arch OUTPUT_VARIABLE said
                  ERROR_QUIET)
  string(REGEX MATCHALL "compute_[0-9]+" known "${said}")
  list(TRANSFORM known REPLACE "compute_" "")
  set(${out} "${known}" PARENT_SCOPE)
endfunction()

# Sets `out` to the compute capabilities of this machine's GPUs, e.g. 90; empty if nvidia-smi does
# not report them.
function(tm_gpus_here out)
  set(sms "")
  if(tm_nvidia_smi)
    execute_process(COMMAND ${tm_nvidia_smi} --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE said ERROR_QUIET RESULT_VARIABLE failed)
    if(failed EQUAL 0)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" sms "${said}")
      list(TRANSFORM sms REPLACE "\\." "")
      list(REMOVE_DUPLICATES sms)
    endif()
  endif()
  set(${out} "${sms}" PARENT_SCOPE)
endfunction()

# Sets `out` to the nvcc architectures for GPUs of `sms`. The letter suffix enables all their
# instructions; if nvcc is older than the GPU, the result is PTX.
function(tm_archs_of_gpus sms known out)
  set(archs "")
  foreach(sm ${sms})
    if(known AND NOT sm IN_LIST known)
      list(APPEND archs 90-virtual)
    elseif(sm LESS 90)
      list(APPEND archs ${sm})
    else()
      list(APPEND archs ${sm}a)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES archs)
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()

# Sets `out` to the entries of tm_all_cuda_archs that nvcc supports. Suffix f needs CUDA 12.9.
function(tm_all_archs known out)
  set(archs "")
  foreach(arch ${tm_all_cuda_archs})
    string(REGEX MATCH "^[0-9]+" number ${arch})
    if(known AND NOT number IN_LIST known)
      continue()
    endif()
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.9)
      string(REGEX REPLACE "f$" "a" arch ${arch})
    endif()
    list(APPEND archs ${arch})
  endforeach()
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()

# Sets `out` to nvcc's option for one entry of tm_cuda_archs.
function(tm_gencode arch out)
  if(arch MATCHES "^(.+)-virtual$")
    set(flag "compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1}")
  else()
    set(flag "compute_${arch},code=sm_${arch}")
  endif()
  set(${out} "SHELL:-gencode arch=${flag}" PARENT_SCOPE)
endfunction()

# Sets `out` to the architectures to compile for on a machine with GPUs of `sms`.
function(tm_resolve_archs sms out)
  set(archs ${TM_CUDA_ARCHS})
  tm_known_archs(known)
  if(TM_CUDA_ARCHS STREQUAL "AUTO")
    tm_archs_of_gpus("${sms}" "${known}" archs)
  endif()
  if(TM_CUDA_ARCHS STREQUAL "ALL" OR NOT archs)
    tm_all_archs("${known}" archs)
  endif()
  set(${out} "${archs}" PARENT_SCOPE)
endfunction()
